"""`TrainConfig`: all that a training run is made of, as plain data.

Every option is one field, with its kind, its default, its place in the help and the text that
explains it; the command line makes its flags from them. Nothing here loads torch.
"""

import dataclasses
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Choice, Flag, Keywords, Kind, Many, OrNone, Real, Text, Whole

LEARNERS = ("maml-trpo", "promp", "reptile")
OBJECTIVES = ("log_likelihood", "likelihood_ratio", "dice")
NONLINEARITIES = ("relu", "tanh", "sigmoid", "elu", "gelu", "leaky_relu", "silu", "softplus")


def _option(
    default: Any, group: str, kind: Kind, text: str, learners: tuple[str, ...] | None = None
) -> Any:
    """Declare a field: its group in the help, its kind, what it means, and which learners ask."""
    if learners is None:
        learners = LEARNERS if group == "learner" else (group,) if group in LEARNERS else ()
    metadata = {"group": group, "kind": kind, "help": text, "learners": learners}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train on, with what, how long and from which seed; all of it checked.

    Two runs with equal configurations end with bitwise the same parameters, whatever
    `num_workers` and `envs_per_worker` are. `asyncmaml train --help` explains the fields.

    Raises:
        ConfigurationError: A field is out of its range, or does not fit the others.
    """

    env_id: str = _option(
        "asyncmaml/Navigation2D-v0",
        "environment",
        Text("ENV_ID", "a Gymnasium id, also as module:Id-v0"),
        "Gymnasium id of an environment with tasks",
    )
    env_kwargs: Mapping[str, Any] = _option(
        {}, "environment", Keywords(), "passed to the environment"
    )
    max_episode_steps: int | None = _option(
        None, "environment", OrNone(Whole(1)), "replaces the environment's time limit"
    )
    gamma: float = _option(0.99, "environment", Real(0, 1), "discount per step")

    hidden_sizes: tuple[int, ...] = _option(
        (100, 100),
        "policy",
        Many(Whole(1), "SIZES", "sizes of layers such as 100,100", may_be_empty=True),
        "hidden layers of the policy",
    )
    nonlinearity: str = _option("relu", "policy", Choice(NONLINEARITIES), "between the layers")
    init_std: float = _option(
        1.0, "policy", Real(0, above=True), "standard deviation of a normal policy's first actions"
    )

    learner: str = _option("maml-trpo", "learner", Choice(LEARNERS), "the meta-learner")
    step_sizes: tuple[float, ...] = _option(
        (0.1,),
        "learner",
        Many(Real(0, above=True), "RATES", "one number above 0 for each update, such as 0.1,0.05"),
        "of the inner updates; as many updates as rates",
    )
    objective: str | None = _option(
        None,
        "learner",
        OrNone(Choice(OBJECTIVES)),
        "of the inner updates; none: that of the learner's paper",
    )
    first_order: bool = _option(
        False,
        "learner",
        Flag(),
        "leave the second derivatives out (FOMAML); not for reptile",
        ("maml-trpo", "promp"),
    )
    gae_lambda: float = _option(1.0, "learner", Real(0, 1), "of the advantages; 1 is Monte Carlo")
    bootstrap_truncated: bool = _option(
        False, "learner", Flag(), "value what comes after the time limit; the paper does not"
    )
    exploration: float = _option(
        0.0, "maml-trpo", Real(0), "weight of E-MAML's term for exploration"
    )

    max_kl: float = _option(0.01, "maml-trpo", Real(0, above=True), "bound of the outer step")
    max_pre_kl: float | None = _option(
        None,
        "maml-trpo",
        OrNone(Real(0, above=True)),
        "bound of the policy's change before adaptation",
    )
    curvature: str = _option(
        "exact", "maml-trpo", Choice(("exact", "cheap")), "of the trust region"
    )
    cg_iterations: int = _option(10, "maml-trpo", Whole(1), "of the conjugate gradient")
    cg_damping: float = _option(1e-5, "maml-trpo", Real(0), "added to the curvature")
    line_search_steps: int = _option(15, "maml-trpo", Whole(1), "tries of the line search")
    line_search_ratio: float = _option(
        0.8, "maml-trpo", Real(0.01, 0.99), "from one try to the next"
    )

    learning_rate: float = _option(1e-3, "promp", Real(0, above=True), "of the outer Adam")
    epochs: int = _option(5, "promp", Whole(1), "outer steps on the episodes of one iteration")
    clip: float = _option(0.3, "promp", Real(0, above=True), "of the likelihood ratio")
    inner_kl: float = _option(
        5e-4, "promp", Real(0), "weight of the policy's change before adaptation"
    )

    outer_step_size: float = _option(
        0.1, "reptile", Real(0, 1, above=True), "towards the mean of the adapted parameters"
    )

    iterations: int = _option(500, "run", Whole(1), "after which the training ends")
    tasks_per_iteration: int = _option(20, "run", Whole(1), "M, drawn anew for each iteration")
    episodes_per_task: int = _option(20, "run", Whole(1), "B, for each update and once after them")
    seed: int = _option(0, "run", Whole(0), "of everything that is drawn")
    num_workers: int | None = _option(
        None,
        "run",
        OrNone(Whole(0)),
        "processes; none: one per core, or 0 if natively vectorised; 0: all in this process",
    )
    envs_per_worker: int | None = _option(
        None, "run", OrNone(Whole(1)), "environments of each; none: the sampler's default"
    )
    step_timeout: float = _option(
        60.0,
        "run",
        Real(0, above=True),
        "seconds that one step of an environment may take in a worker",
    )
    device: str = _option(
        "cpu", "run", Text("DEVICE", "a torch device"), "where policy and learner run"
    )
    on_task_error: str = _option(
        "raise",
        "run",
        Choice(("raise", "skip")),
        "a task whose environment fails: end the run, or go on without the task",
    )
    evaluation_interval: int = _option(
        10, "run", Whole(0), "iterations between evaluations on held-out tasks; 0: none"
    )
    evaluation_tasks: int = _option(20, "run", Whole(1), "held-out tasks of each evaluation")
    evaluation_episodes: int = _option(20, "run", Whole(1), "of each of these, for each update")
    checkpoint_interval: int = _option(
        10, "run", Whole(1), "iterations between checkpoints; there is one at the end anyway"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = field.metadata["kind"].check(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self._check_learner()

    def _check_learner(self) -> None:
        """Refuse options that the learner would pass over in silence."""
        for option in options():
            is_anothers = option.learners and self.learner not in option.learners
            if is_anothers and getattr(self, option.name) != option.default:
                message = (
                    f"{option.name} is {getattr(self, option.name)!r}, which the learner "
                    f"{self.learner} does not know; leave it out, or train with "
                    + " or ".join(option.learners)
                )
                raise ConfigurationError(message)

    @property
    def num_updates(self) -> int:
        """K, inner updates of a task."""
        return len(self.step_sizes)

    # ---- from and to files ----

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return the configuration of that name; `asyncmaml train --help` lists them.

        Raises:
            ConfigurationError: There is none.
        """
        from asyncmaml.presets import PRESETS

        if name not in PRESETS:
            message = f"there is no preset {name!r}{_near(name, PRESETS)}; there are: " + ", ".join(
                sorted(PRESETS)
            )
            raise ConfigurationError(message)
        return cls(**PRESETS[name].fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote, or a configuration of pytorch-maml-rl in YAML.

        Raises:
            ConfigurationError: The file holds no configuration.
            MissingExtraError: YAML needs PyYAML, which is not installed.
        """
        try:
            text = Path(path).read_text()
        except UnicodeDecodeError as error:
            message = f"{os.fspath(path)} holds no configuration: it is no text, {error}"
            raise ConfigurationError(message) from error
        if Path(path).suffix.lower() in (".yaml", ".yml"):
            from asyncmaml.yaml_config import fields_of_yaml

            return cls._of_fields(fields_of_yaml(text, os.fspath(path)), os.fspath(path))
        return cls.from_json(text, os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all fields as JSON."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        """Return all fields as JSON, one in a line."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the text") -> Self:
        """Return what `to_json` wrote; fields that are left out have their defaults.

        Raises:
            ConfigurationError: It is something else; `where` tells what.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            message = f"{where} holds no configuration: it is no JSON, {error}"
            raise ConfigurationError(message) from error
        return cls._of_fields(fields, where)

    @classmethod
    def _of_fields(cls, fields: object, where: str) -> Self:
        if not isinstance(fields, Mapping):
            message = f"{where} holds no configuration: wanted a mapping, found {fields!r}"
            raise ConfigurationError(message)
        return cls(**_known(fields, where))

    def replace(self, **changes: Any) -> Self:
        """Return this configuration with some fields changed.

        Another `learner` leaves behind what it does not know of the old one's options.

        Raises:
            ConfigurationError: There is no such field, or its value is out of range.
        """
        learner = changes.get("learner", self.learner)
        left_behind = {
            option.name: option.default
            for option in options()
            if option.learners and learner not in option.learners
        }
        return dataclasses.replace(self, **(left_behind | _known(changes, "replace()")))


@dataclass(frozen=True)
class Option:
    """One field of `TrainConfig`, for who makes flags or tables of them."""

    name: str
    group: str
    kind: Kind
    help: str
    default: Any
    learners: tuple[str, ...]
    """Which ones take it as an argument; none for what belongs to no learner."""


def options() -> Iterator[Option]:
    """Yield all fields of `TrainConfig`, those of a group one after the other."""
    for field in dataclasses.fields(TrainConfig):
        has_default = field.default is not dataclasses.MISSING
        default = field.default if has_default else {}
        about = field.metadata
        yield Option(field.name, default=default, **about)


def _known(fields: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return the fields, all of which `TrainConfig` has."""
    names = [option.name for option in options()]
    for name in fields:
        if name not in names:
            message = (
                f"{where} has {name!r}, which is no field of a configuration{_near(name, names)}; "
                "correct its name, or leave it out"
            )
            raise ConfigurationError(message)
    return dict(fields)


def _near(name: object, names: Any) -> str:
    """Name what was probably meant."""
    near = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
