"""Compares samplers: asynchronous and lock step, ours and Gymnasium's vector environments.

    python benchmarks/compare_samplers.py            # some 6 minutes on 2 cores
    python benchmarks/compare_samplers.py --quick    # within one
    python benchmarks/compare_samplers.py --workloads CartPole,Null --repeats 10

All contenders of a workload are opened once and warmed up, then measured in turn, repeat after
repeat: a machine that drifts does it to all alike. Ratios are taken within a repeat. Counted are
valid transitions only. `AsyncSampler` is measured while calls of `sample()` overlap, one under
way and the next in the queue; `BatchSampler` with whole calls, one after the other; Gymnasium's
environments without end, and without the checker that `gymnasium.make` puts around them.

The limit of a workload is what its parts cost by themselves: raw steps on all cores at once, and
the batched policy in one thread. CPU time is that of all processes together.
"""

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from chart import draw
from comparison import Result, run_workload
from plans import PLANS
from reporting import as_json, machine_facts, show, show_targets


def main() -> None:
    arguments = _parse()
    began = time.perf_counter()
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    results: list[Result] = []
    for name in arguments.workloads:
        if name == "HalfCheetah" and find_spec("mujoco") is None:
            print("\nHalfCheetah is left out: install the extra asyncmaml[mujoco] for it")
            continue
        for workload in PLANS[name](arguments.quick):
            result = run_workload(workload, arguments.repeats, arguments.seconds, _report)
            show(result)
            results.append(result)
    show_targets(results)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(arguments, name) for name in ("quick", "repeats", "seconds")}
    content = {
        "machine": facts,
        "settings": settings,
        "workloads": {result.workload.key: as_json(result) for result in results},
    }
    (output / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    written = ["results.json"]
    if find_spec("matplotlib") is None:
        print("\nno chart: install the extra asyncmaml[plot] for it")
    else:
        draw(results, facts, output / "results.png")
        written.append("results.png")
    seconds = time.perf_counter() - began
    print(f"\nwrote {' and '.join(written)} to {output} after {seconds:.0f} s")


def _parse() -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="within a minute, less exact")
    parser.add_argument(
        "--workloads",
        type=_workloads,
        default=list(PLANS),
        metavar="A,B",
        help=f"some of {', '.join(PLANS)}",
    )
    parser.add_argument("--repeats", type=int, help="5, or 2 with --quick")
    parser.add_argument("--seconds", type=float, help="of each measurement; 2 or 0.2")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/compare_samplers"),
        help="folder for results.json and results.png",
    )
    arguments = parser.parse_args()
    if arguments.repeats is None:
        arguments.repeats = 2 if arguments.quick else 5
    if arguments.seconds is None:
        arguments.seconds = 0.2 if arguments.quick else 2.0
    if arguments.repeats < 1 or arguments.seconds <= 0:
        parser.error("--repeats must be 1 or more, --seconds above 0")
    return arguments


def _workloads(text: str) -> list[str]:
    known = {name.lower(): name for name in PLANS}
    names = [name.strip().lower() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        message = f"no workload {', '.join(unknown)}; there are {', '.join(PLANS)}"
        raise argparse.ArgumentTypeError(message)
    return [known[name] for name in names]


def _report(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
