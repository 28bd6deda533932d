"""Which contenders meet on which workload, and what was promised of them."""

from collections.abc import Callable

from comparison import Result, Target, Workload
from contenders import AsyncContender, Contender, LockStepContender, VectorContender
from raw_stepping import RawForm
from workloads import SOURCES

from asyncmaml.sampling.arguments import usable_cores
from asyncmaml.worker.fleet import DEFAULT_ROWS

# Episodes of a row in one sample(); rows that end early go on with the next request.
_CARTPOLE_EPISODES = 5120  # of one worker's rows together
_EPISODES = 8
_HALF_CHEETAH_EPISODES = 4  # of 200 steps all

_CARTPOLE_ENVS = 128
_CARTPOLE_PROCESSES = 256
_CARTPOLE_PROCESSES_QUICK = 16  # more of them take too long to start
_NAVIGATION_ROWS = 400
_STRAGGLER_WORKERS = 8


def plan_cartpole(quick: bool) -> list[Workload]:
    source = SOURCES["CartPole"]
    ours: list[Contender] = [
        AsyncContender(source, 2, rows, episodes_per_row=_CARTPOLE_EPISODES // rows)
        for rows in (64, _CARTPOLE_PROCESSES // 2, 512)
    ]
    sync = VectorContender(source, _CARTPOLE_ENVS, is_async=False)
    num_envs = _CARTPOLE_PROCESSES_QUICK if quick else _CARTPOLE_PROCESSES
    processes = VectorContender(source, num_envs, is_async=True)
    contenders = [
        *ours,
        LockStepContender(source, 0, _CARTPOLE_ENVS, episodes_per_row=20),
        sync,
        processes,
    ]
    text = f"{ours[1].label} against {processes.label}"
    if quick:
        text += " (fewer envs: --quick)"
    targets = [
        _faster(10, [ours[1]], [processes], text),
        _faster(1.3, ours, [sync], f"AsyncSampler, the best one, against {sync.label}"),
    ]
    return [Workload("CartPole", "CartPole-v1", contenders, sync.label, targets)]


def plan_half_cheetah(quick: bool) -> list[Workload]:
    source = SOURCES["HalfCheetah"]
    ours = AsyncContender(source, 2, 32, _HALF_CHEETAH_EPISODES)
    default = AsyncContender(
        source, usable_cores(), None, _HALF_CHEETAH_EPISODES, note=" (default)"
    )
    lock_step = LockStepContender(source, 2, episodes_per_row=5)
    contenders = [
        ours,
        default,
        lock_step,
        VectorContender(source, 64, is_async=False),
        VectorContender(source, 2, is_async=True),
    ]
    text = f"AsyncSampler, the better one, against {lock_step.label}"
    targets = [_faster(2.5, [ours, default], [lock_step], text), _cpu_share(0.75, default)]
    title = "HalfCheetah-v5, 200 steps"
    # Of many environments each finds the caches cold, whoever steps them; alone it does not.
    raw_forms = (RawForm(), RawForm(DEFAULT_ROWS))
    return [
        Workload("HalfCheetah", title, contenders, lock_step.label, targets, raw_forms=raw_forms)
    ]


def plan_navigation(quick: bool) -> list[Workload]:
    source = SOURCES["Navigation2D"]
    rows = _NAVIGATION_ROWS
    vectorized: list[Contender] = [
        AsyncContender(source, 0, rows, _EPISODES, vectorized=True, note=" vectorised"),
        AsyncContender(source, 2, rows // 2, _EPISODES, vectorized=True, note=" vectorised"),
    ]
    single: list[Contender] = [
        AsyncContender(source, 0, rows, _EPISODES),
        AsyncContender(source, 2, rows // 2, _EPISODES),
    ]
    sync = VectorContender(source, rows, is_async=False)
    contenders = [*vectorized, *single, LockStepContender(source, 0, rows), sync]
    return [
        Workload(
            "Navigation2D",
            "Navigation2D",
            contenders,
            sync.label,
            [_faster(10, vectorized, single, "AsyncSampler vectorised against not, best of each")],
            raw_forms=(RawForm(), RawForm(rows // 2, is_vectorized=True)),
        )
    ]


def plan_straggler(quick: bool) -> list[Workload]:
    source = SOURCES["Straggler"]
    episodes = 2 if quick else 5
    ours = AsyncContender(source, _STRAGGLER_WORKERS, 1, episodes)
    lock_step = LockStepContender(source, _STRAGGLER_WORKERS, episodes_per_row=episodes)
    return [
        Workload(
            "Straggler",
            "Straggler, sleeps 2 ms a step (exponential)",
            [ours, lock_step, VectorContender(source, _STRAGGLER_WORKERS, is_async=True)],
            lock_step.label,
            [_faster(2, [ours], [lock_step])],
            num_raw_processes=_STRAGGLER_WORKERS,
            sleeps=True,
        )
    ]


def plan_null(quick: bool) -> list[Workload]:
    workloads = []
    for key, actions in (("Null", "discrete actions"), ("NullBox", "Box actions")):
        ours = AsyncContender(SOURCES[key], 2, 128, _EPISODES, vectorized=True)
        targets = [_tick_share(ours), _tick(ours, is_own=False), _tick(ours, is_own=True)]
        title = f"Environment that costs nothing, {actions}"
        workloads.append(Workload(key, title, [ours], None, targets, raw_forms=()))
    return workloads


PLANS: dict[str, Callable[[bool], list[Workload]]] = {
    "CartPole": plan_cartpole,
    "HalfCheetah": plan_half_cheetah,
    "Navigation2D": plan_navigation,
    "Straggler": plan_straggler,
    "Null": plan_null,
}


def _faster(
    wanted: float, ours: list[Contender], theirs: list[Contender], text: str = ""
) -> Target:
    """Return the target of a ratio of throughputs, the best of each side in each repeat."""

    def best(result: Result, contenders: list[Contender], repeat: int) -> float:
        return max(result.rate(contender.label, repeat) for contender in contenders)

    def value(result: Result, repeat: int) -> float:
        return best(result, ours, repeat) / best(result, theirs, repeat)

    return Target(text or f"{ours[0].label} against {theirs[0].label}", wanted, value)


def _cpu_share(wanted: float, ours: Contender) -> Target:
    def value(result: Result, repeat: int) -> float:
        return result.cpu_share(ours, repeat)

    return Target(f"{ours.label}, share of the CPU limit", wanted, value)


def _tick_share(ours: Contender) -> Target:
    """Return the target of a tick against the forward and draw inside of that same tick."""

    def value(result: Result, repeat: int) -> float:
        measurement = result.measurements[ours.label][repeat]
        assert measurement.busy_us_per_tick is not None
        assert measurement.forward_us_per_tick is not None
        return measurement.busy_us_per_tick / measurement.forward_us_per_tick

    return Target(f"{ours.label}, tick against its forward and draw", 1.4, value, is_at_most=True)


def _tick(ours: Contender, *, is_own: bool) -> Target:
    """Return the target of a tick against a loop of nothing else, whose caches stay warm."""

    def value(result: Result, repeat: int) -> float:
        busy = result.measurements[ours.label][repeat].busy_us_per_tick
        cost = result.policy_costs[ours.label][repeat]
        assert busy is not None
        return busy / (cost.own_us if is_own else cost.users_us)

    way = "our forward and draw" if is_own else "policy(obs).sample()"
    return Target(f"{ours.label}, tick against {way} in a loop", 1.4, value, is_at_most=True)
