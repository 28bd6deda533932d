"""What `asyncmaml sample` tells: numbers as plain data, and the same as text of 80 columns."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.sampling.statistics import Statistics

_LABEL_WIDTH = 19
_MAX_TASKS = 20
_TASK_WIDTH = 36


# ---- plain data ----


def summarize(batches: Sequence[BatchEpisodes]) -> dict[str, Any]:
    """Count the episodes of all batches together; returns are not discounted."""
    return {
        "episodes": sum(episodes.batch_size for episodes in batches),
        "transitions": sum(episodes.num_transitions for episodes in batches),
        "return": _spread(torch.cat([episodes.episode_returns for episodes in batches])),
        "length": _spread(torch.cat([episodes.lengths for episodes in batches])),
        "terminated": sum(int(episodes.terminated.sum()) for episodes in batches),
        "truncated": sum(int(episodes.truncated.sum()) for episodes in batches),
    }


def summarize_times(statistics: Statistics, seconds: float, num_workers: int) -> dict[str, Any]:
    """Tell how fast it was and where the time went.

    Args:
        statistics: Of a sampler that did nothing else.
        seconds: From the first request to the last episode, wall time.
        num_workers: 0: the environments ran in the sampler's own thread.
    """
    policy = statistics.forward_seconds
    busy = statistics.thread_seconds + (0 if num_workers else statistics.environment_seconds)
    return {
        "seconds": seconds,
        "steps_per_second": statistics.transitions / seconds,
        "workers": num_workers,
        "restarts": statistics.restarts,
        "time": {
            "environment_seconds": statistics.environment_seconds,
            "policy_seconds": policy,
            "recording_seconds": statistics.thread_seconds - policy,
            # Not what the sampler counted: it waited before the first request as well.
            "waiting_seconds": max(0.0, seconds - busy),
        },
    }


def plain(task: Any) -> Any:
    """Return a task as what JSON knows; what it does not know as its `repr`."""
    if isinstance(task, np.ndarray | np.generic | Tensor):
        return task.tolist()
    if isinstance(task, Mapping):
        return {str(key): plain(value) for key, value in task.items()}
    if isinstance(task, list | tuple):
        return [plain(value) for value in task]
    return task if task is None or isinstance(task, str | bool | int | float) else repr(task)


def _spread(numbers: Tensor) -> dict[str, float | None]:
    """Mean, standard deviation of the sample (None for one number alone), least and greatest."""
    return {
        "mean": numbers.double().mean().item(),
        "sd": numbers.double().std().item() if len(numbers) > 1 else None,
        "min": numbers.min().item(),
        "max": numbers.max().item(),
    }


# ---- text ----


def report(result: Mapping[str, Any]) -> str:
    """Lay out what `sample` found."""
    policy = result["policy"]
    layers = ", ".join(map(str, policy["hidden_sizes"])) or "no hidden layer"
    origin = f"from {policy['file']}" if policy["file"] else "fresh"
    lines = [
        f"{result['environment']}, seed {result['seed']}",
        f"{policy['class']} ({layers}), {origin}",
        "",
        *_outcome_lines(result),
        "",
        *_time_lines(result),
    ]
    if result["tasks"]:
        lines += ["", *_task_lines(result["tasks"])]
    if result["files"]:
        lines += ["", "wrote " + ", ".join(result["files"])]
    return "\n".join(lines)


def _outcome_lines(result: Mapping[str, Any]) -> list[str]:
    speed = f"{result['steps_per_second']:,.0f}"
    where = _counted(result["workers"], "worker") if result["workers"] else "no workers"
    rows = [
        ("episodes", f"{result['episodes']:,}", ""),
        ("return", _mean(result["return"]), _range(result["return"])),
        ("length in steps", _mean(result["length"]), _range(result["length"])),
        ("terminated", f"{result['terminated']:,}", ""),
        ("truncated", f"{result['truncated']:,}", ""),
        ("transitions", f"{result['transitions']:,}", ""),
        ("steps per second", speed, f"in {_seconds(result['seconds'])} s with {where}"),
    ]
    if result["restarts"]:
        rows.append(("restarts", f"{result['restarts']:,}", "workers were lost and replaced"))
    # The means end in one column, and their spreads begin in the next.
    before = max(len(number.partition(" ")[0]) for _, number, _ in rows)
    after = max(len(number.partition(" ")[2]) for _, number, _ in rows)
    lines = []
    for name, number, remark in rows:
        mean, _, spread = number.partition(" ")
        lines.append(f"{name:<{_LABEL_WIDTH}}{mean:>{before}} {spread:<{after}}  {remark}".rstrip())
    return lines


def _time_lines(result: Mapping[str, Any]) -> list[str]:
    spent, seconds, workers = result["time"], result["seconds"], result["workers"]
    whose = "of the sampler's own thread" if workers else "of the one thread that did it all"
    in_workers = f"sum over {_counted(workers, 'worker')}, share of their time"
    environment_seconds = spent["environment_seconds"]
    rows = [
        ("environment", environment_seconds, workers or 1, in_workers if workers else whose),
        ("policy", spent["policy_seconds"], 1, whose),
        ("recording", spent["recording_seconds"], 1, whose),
        ("waiting", spent["waiting_seconds"], 1, whose),
    ]
    lines = [f"{'time spent':<{_LABEL_WIDTH}}{'seconds':>8}{'share':>10}"]
    for name, part, count, remark in rows:
        share = part / (count * seconds)
        lines.append(f"{name:<{_LABEL_WIDTH}}{_seconds(part):>8}{100 * share:>8.1f} %  {remark}")
    return lines


def _task_lines(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (_task_text(entry["task"]), _mean(entry["return"]), _mean(entry["length"]))
        for entry in tasks[:_MAX_TASKS]
    ]
    rows.insert(0, ("task", "return", "length"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{task:<{widths[0]}}  {value:>{widths[1]}}  {length:>{widths[2]}}"
        for task, value, length in rows
    ]
    if len(tasks) > _MAX_TASKS:
        lines.append(f"and {len(tasks) - _MAX_TASKS:,} more; --json tells all")
    return lines


def _task_text(task: Any) -> str:
    text = json.dumps(_rounded(task))
    return text if len(text) <= _TASK_WIDTH else text[: _TASK_WIDTH - 3] + "..."


def _rounded(task: Any) -> Any:
    if isinstance(task, float):
        return round(task, 3)
    if isinstance(task, dict):
        return {key: _rounded(value) for key, value in task.items()}
    return [_rounded(value) for value in task] if isinstance(task, list) else task


def _mean(spread: Mapping[str, float | None]) -> str:
    mean, deviation = spread["mean"], spread["sd"]
    assert mean is not None
    if deviation is None:
        return f"{mean:,.{0 if mean.is_integer() else _decimals(mean)}f}"
    decimals = _decimals(max(abs(mean), deviation))
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}"


def _range(spread: Mapping[str, float | None]) -> str:
    low, high = spread["min"], spread["max"]
    assert low is not None
    assert high is not None
    if float(low).is_integer() and float(high).is_integer():
        return f"({low:,.0f} .. {high:,.0f})"
    decimals = _decimals(max(abs(low), abs(high)))
    return f"({low:,.{decimals}f} .. {high:,.{decimals}f})"


def _decimals(number: float) -> int:
    """So that three or more digits count."""
    if number == 0:
        return 1
    return min(6, max(1, 2 - math.floor(math.log10(abs(number)))))


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
