"""The results as tables for the terminal and as JSON."""

import dataclasses
import os
import platform
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparison import Result
from contenders import Contender
from measuring import Spread

from asyncmaml.sampling.arguments import usable_cores

_HEADER = (
    "contender",
    "transitions/s",
    "ratio",
    "CPU us a transition",
    "own + children",
    "rows",
    "share: CPU",
    "wall",
)

_LEAST_WIDTH = 150  # of the widest table


def short(number: float) -> str:
    """Return three digits: 2.79M, 141k, 28.9k, 950."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            scaled = number / size
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{number:.0f}"


def in_words(spread: Spread, form: str = "{:.2f}") -> str:
    """Return the median with the extremes behind it."""
    numbers = (form.format(value) for value in dataclasses.astuple(spread))
    return "{} ({}..{})".format(*numbers)


def show(result: Result) -> None:
    """Print the table of a workload, its limit, or the time of a tick."""
    print()
    workload = result.workload
    rows = [_row(result, contender) for contender in workload.contenders]
    baseline = f"; ratio to {workload.baseline}" if workload.baseline else ""
    others = Spread.of(
        measurement.reading.others_cpu_seconds / measurement.reading.wall_seconds
        for measurements in result.measurements.values()
        for measurement in measurements
    )
    title = f"{workload.title}: median (least..greatest) of {result.num_repeats}{baseline}"
    _print_table(title, _HEADER, rows, range(1, len(_HEADER)))
    print(f"  other processes took {others.median:.1f} cores meanwhile")
    if not result.raw:
        _print_ticks(result, workload.contenders[0])
    for is_vectorized in dict.fromkeys(form.is_vectorized for form in result.raw):
        alike = (c for c in workload.contenders if c.is_vectorized == is_vectorized)
        print(_limit_in_words(result, next(alike)))
    if len(result.raw) > 1:
        for form, repeats in result.raw.items():
            cost = in_words(Spread.of(raw.cpu_us for raw in repeats), "{:.2f}")
            print(f"  {form.in_words} in each process: a raw step takes {cost} us CPU")


def _row(result: Result, contender: Contender) -> list[str]:
    label = contender.label
    measurements = result.measurements[label]
    rate = Spread.of(measurement.rate for measurement in measurements)
    cpu = Spread.of(measurement.cpu_us for measurement in measurements)
    parent = Spread.of(measurement.parent_us for measurement in measurements).median
    children = Spread.of(measurement.children_us for measurement in measurements).median
    rows = Spread.of(measurement.rows_per_forward for measurement in measurements).median
    ratio = cpu_share = rate_share = "-"
    baseline = result.workload.baseline
    if baseline is not None:
        spread = result.over_repeats(
            lambda repeat: result.rate(label, repeat) / result.rate(baseline, repeat)
        )
        ratio = in_words(spread)
    if result.raw:
        rate_share = f"{result.over_repeats(lambda r: result.rate_share(contender, r)).median:.2f}"
        if not result.workload.sleeps:
            shares = result.over_repeats(lambda r: result.cpu_share(contender, r))
            cpu_share = f"{shares.median:.2f}"
    return [
        contender.label,
        f"{short(rate.median)} ({short(rate.least)}..{short(rate.greatest)})",
        ratio,
        in_words(cpu, "{:.1f}"),
        f"{parent:.1f} + {children:.1f}",
        f"{rows:.0f}",
        cpu_share,
        rate_share,
    ]


def _limit_in_words(result: Result, contender: Contender) -> str:
    limits = [result.limit(contender, repeat) for repeat in range(result.num_repeats)]
    found = [limit for limit in limits if limit is not None]
    rate = Spread.of(limit.rate for limit in found).median
    share = in_words(result.over_repeats(lambda r: result.rate_share(contender, r)))
    if result.workload.sleeps:
        count = result.workload.num_raw_processes
        steps = Spread.of(raw.wall_us for raw in result.raw_of(False)).median / 1000
        return (
            f"  limit: {count} workers that never wait, {steps:.2f} ms a step = "
            f"{short(rate)}/s; {contender.label} reaches {share} of it"
        )
    raw_us = Spread.of(limit.raw_us for limit in found).median
    policy_us = Spread.of(limit.policy_us for limit in found).median
    cpu_us = Spread.of(limit.cpu_us for limit in found).median
    cpu_share = in_words(result.over_repeats(lambda r: result.cpu_share(contender, r)))
    return (
        f"  limit: raw step {raw_us:.2f} us + policy {policy_us:.2f} us = {cpu_us:.2f} us CPU, on "
        f"{usable_cores()} cores {short(rate)}/s; {contender.label} reaches {cpu_share} of it in "
        f"CPU time, {share} in wall time"
    )


def _print_ticks(result: Result, contender: Contender) -> None:
    measurements = result.measurements[contender.label]
    costs = result.policy_costs[contender.label]
    busy = Spread.of(m.busy_us_per_tick for m in measurements if m.busy_us_per_tick is not None)
    users = Spread.of(cost.users_us for cost in costs)
    own = Spread.of(cost.own_us for cost in costs)
    cpu = Spread.of(m.parent_us * m.rows_per_forward for m in measurements)
    form = "{:.0f}"
    print(
        f"  a tick of the sampler thread is busy for {in_words(busy, form)} us (CPU time of "
        f"the whole process {in_words(cpu, form)} us); by itself, "
        f"policy(obs).sample() takes {in_words(users, form)} us, our forward and draw "
        f"{in_words(own, form)} us"
    )


def show_targets(results: Sequence[Result]) -> None:
    """Print what was promised, with what was measured."""
    rows = []
    for result in results:
        for target in result.workload.targets:
            spread = result.over_repeats(lambda r, t=target, x=result: t.value(x, r))  # type: ignore[misc]
            sign = "<=" if target.is_at_most else ">="
            verdict = "ok" if target.is_met(spread.median) else "missed"
            wanted = f"{sign} {target.wanted:g}"
            rows.append([result.workload.key, target.text, wanted, in_words(spread), verdict])
    print()
    _print_table("Targets", ("workload", "what", "wanted", "measured", ""), rows, range(2, 4))


def _print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], numbers: range
) -> None:
    """Print a table; `numbers` are its columns of numbers."""
    if find_spec("rich") is not None:
        box = import_module("rich.box").SIMPLE_HEAD
        table = import_module("rich.table").Table(title=title, title_justify="left", box=box)
        for index, name in enumerate(header):
            table.add_column(name, no_wrap=True, justify="right" if index in numbers else "left")
        for row in rows:
            table.add_row(*row)
        # In a narrow terminal lines break, which is better than losing columns.
        width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
        import_module("rich.console").Console(width=width).print(table)
        return
    print(plain_table(title, header, rows, numbers))


def plain_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], numbers: range
) -> str:
    """Return a table in plain text, as it can be put into a note; `numbers` are as above."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [title]
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def machine_facts() -> dict[str, Any]:
    """Return what the numbers depend on."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    packages = ("asyncmaml", "torch", "gymnasium", "numpy", "mujoco")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": usable_cores(),
        "cpu": cpu,
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
    } | {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    # A checkout on PYTHONPATH has no metadata, and mujoco may be missing.
    if package == "asyncmaml":
        return str(import_module(package).__version__)
    return version(package) if find_spec(package) else None


def as_json(result: Result) -> dict[str, Any]:
    """Return all repeats of a workload."""
    workload = result.workload
    return {
        "title": workload.title,
        "baseline": workload.baseline,
        "contenders": {c.label: _contender_as_json(result, c) for c in workload.contenders},
        "raw": {
            form.in_words: [dataclasses.asdict(raw) for raw in repeats]
            for form, repeats in result.raw.items()
        },
        "targets": [
            {
                "text": target.text,
                "wanted": target.wanted,
                "at_most": target.is_at_most,
                "repeats": [target.value(result, r) for r in range(result.num_repeats)],
            }
            for target in workload.targets
        ],
    }


def _contender_as_json(result: Result, contender: Contender) -> dict[str, Any]:
    repeats = []
    for repeat in range(result.num_repeats):
        measurement = result.measurements[contender.label][repeat]
        limit = result.limit(contender, repeat)
        repeats.append(
            dataclasses.asdict(measurement)
            | {
                "transitions_per_second": measurement.rate,
                "parent_cpu_us": measurement.parent_us,
                "children_cpu_us": measurement.children_us,
                "policy_cost": dataclasses.asdict(result.policy_costs[contender.label][repeat]),
                "limit": None if limit is None else dataclasses.asdict(limit),
            }
        )
    return {"family": contender.family, "envs": contender.num_rows, "repeats": repeats}
