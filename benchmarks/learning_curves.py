"""Trains families of tasks under several seeds, and tells how well what they learned adapts.

    python benchmarks/learning_curves.py navigation-2d --output runs/proof
    python benchmarks/learning_curves.py bandit tabular-mdp --seeds 1 2 3 --output runs/proof
    python benchmarks/learning_curves.py halfcheetah-dir --output runs/proof

Each run is `asyncmaml train PRESET` with the changes of `PLANS`, then evaluated on 40 held-out
tasks by the paper's protocol (Finn et al. 2017): 40 episodes after each gradient step, the first
one with the step size of training, the others with half of it. Bandits and MDPs are told as a score
as well: 0 is the random policy and 1 the best one that knows the task. A run that is in the folder
already is resumed. Ends with a table, and with a picture of the learning curves of each family.
"""

import argparse
import asyncio
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reporting import machine_facts, plain_table

import asyncmaml
from asyncmaml.checkpoint import Row
from asyncmaml.envs.oracles import reference_returns
from asyncmaml.evaluation import adapted_tasks, halving_step_sizes, policy_and_config
from asyncmaml.plots.learning_curves import draw_learning_curves
from asyncmaml.training.estimates import Estimate, estimate

TAKE_OFF = 10  # iterations after which a policy should walk, and stay, at the goals' mean
PAPER = (-40.4, -11.7, -3.3, -3.2)  # Navigation2D: Finn et al. (2017), table 4
NUM_TASKS, NUM_EPISODES, NUM_UPDATES = 40, 40, 3


@dataclass(frozen=True)
class Plan:
    """How a family is trained here."""

    iterations: int
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the preset."""
    has_score: bool = False
    """Whether the best and the random return of a task are known."""


PLANS = {
    "navigation-2d": Plan(100),
    "bandit": Plan(60, has_score=True),
    "tabular-mdp": Plan(60, has_score=True),
    # Reduced: the full preset takes 40 tasks of 20 episodes, and 500 iterations.
    "halfcheetah-dir": Plan(100, {"tasks_per_iteration": 10, "episodes_per_task": 10}),
}


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    seed: int
    history: tuple[Row, ...]
    returns: list[Estimate]
    scores: list[Estimate]

    @property
    def minutes(self) -> float:
        """Of training."""
        return float(self.history[-1]["elapsed_seconds"]) / 60

    @property
    def least_before(self) -> float:
        """Least mean return before adaptation, once the policy has taken off."""
        return min(float(row["return_0"]) for row in self.history[TAKE_OFF:] or self.history)


def main() -> None:
    arguments = _parse()
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for family in arguments.families:
        plan = PLANS[family]
        iterations = arguments.iterations or plan.iterations
        folders, outcomes = [], []
        for seed in arguments.seeds:
            folder = arguments.output / f"{family}-{seed}"
            outcomes.append(asyncio.run(run(family, plan, iterations, seed, folder)))
            folders.append(folder)
        show(family, outcomes)
        picture = arguments.output / f"{family}.png"
        draw_learning_curves(folders, picture)
        print(f"wrote {picture}\n", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="+", choices=PLANS, metavar="FAMILY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, help="in place of what is planned")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    return parser.parse_args()


async def run(family: str, plan: Plan, iterations: int, seed: int, folder: Path) -> Outcome:
    """Train, or go on training, and evaluate."""
    config = asyncmaml.TrainConfig.preset(family).replace(
        **plan.changes, iterations=iterations, seed=seed
    )
    result = await asyncmaml.train(
        config, folder, resume=True, on_iteration=lambda row: _tell(family, seed, row)
    )
    report = await asyncmaml.evaluate(
        folder,
        num_tasks=NUM_TASKS,
        num_episodes=NUM_EPISODES,
        num_updates=NUM_UPDATES,
    )
    scores = await _scores(folder) if plan.has_score else []
    return Outcome(seed, result.history, report.returns, scores)


def _tell(family: str, seed: int, row: Row) -> None:
    if row["iteration"] % 10 == 0:
        before, after = row["return_0"], row["return_1"]
        print(
            f"{family} seed {seed} iteration {row['iteration']}: {before:.1f} -> {after:.1f}, "
            f"{row['seconds']:.2f} s",
            flush=True,
        )


async def _scores(folder: Path) -> list[Estimate]:
    """Return the normalised score after each number of gradient steps."""
    policy, config = policy_and_config(folder)
    adapted = await adapted_tasks(
        policy,
        config,
        NUM_TASKS,
        num_episodes=NUM_EPISODES,
        step_sizes=halving_step_sizes(config, NUM_UPDATES),
        seed=1,
    )
    horizon = config.max_episode_steps or 1
    references = [reference_returns(one.task, horizon=horizon) for one in adapted]
    return [
        estimate(
            [
                reference.score(one.returns[steps])
                for one, reference in zip(adapted, references, strict=True)
            ]
        )
        for steps in range(NUM_UPDATES + 1)
    ]


def show(family: str, outcomes: list[Outcome]) -> None:
    """Print what came of a family's runs."""
    steps = [f"{number} steps" for number in range(NUM_UPDATES + 1)]
    rows = [
        [
            str(outcome.seed),
            *(f"{one.mean:.2f} ± {one.sd:.2f}" for one in outcome.returns),
            f"{outcome.least_before:.1f}",
            f"{outcome.minutes:.1f}",
        ]
        for outcome in outcomes
    ]
    if family == "navigation-2d":
        rows.append(["paper", *map(str, PAPER), "", ""])
    title = f"\n{family}: {len(outcomes[0].history)} iterations; mean return ± s.d. over tasks"
    header = ["seed", *steps, "least before", "minutes"]
    print(plain_table(title, header, rows, range(1, len(header))))
    if outcomes[0].scores:
        scores = [
            [str(outcome.seed), *(f"{one.mean:.3f} ± {one.sd:.3f}" for one in outcome.scores)]
            for outcome in outcomes
        ]
        title = "score: 0 is the random policy, 1 the best one"
        print(plain_table(title, ["seed", *steps], scores, range(1, len(header))))
    margins = [outcome.returns[1].mean - outcome.returns[0].mean for outcome in outcomes]
    print(
        f"one gradient step adds {statistics.fmean(margins):.2f} on average, "
        f"{min(margins):.2f} at least"
    )


if __name__ == "__main__":
    main()
