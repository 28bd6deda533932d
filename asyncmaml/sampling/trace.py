"""A trace of who did what when, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

One lane for the sampler's thread, one for each worker, one for each thread that uses `span()`;
beside them each request from its call to its result, and counters. The format is the JSON array of
Chrome's trace events, which readers accept without its closing bracket: what was written before
a crash can be looked at.

Source of the format: "Trace Event Format", Google, the document linked from
https://chromium.googlesource.com/catapult/+/HEAD/tracing/README.md.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from asyncmaml.errors import ConfigurationError

_LOG = logging.getLogger("asyncmaml")
_SAMPLER_LANE = 1
_FIRST_WORKER_LANE = 10
_FIRST_THREAD_LANE = 100_000  # behind any number of workers
_EVENTS_AT_ONCE = 2048


class Trace:
    """Writes events into a file, from any thread.

    Args:
        path: The file, replaced if it is there.

    Raises:
        ConfigurationError: It cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as error:
            message = f"trace={os.fspath(path)!r} cannot be written: {error.strerror}"
            raise ConfigurationError(message) from error
        self._lock = threading.Lock()
        self._events: list[str] = []
        self._lanes: set[int] = set()
        self._process = os.getpid()
        self._is_first = True
        self._name_lane(_SAMPLER_LANE, "sampler thread")

    def tick(self, marks: tuple[float, float, float, float, float], rows: int) -> None:
        """Enter a tick of the coordinator.

        Args:
            marks: When it began, had recorded, dealt and gathered, drawn the actions, and ended.
            rows: Rows that it drew actions for.
        """
        began, recorded, gathered, acted, ended = marks
        self._enter("tick", _SAMPLER_LANE, began, ended, rows=rows)
        parts = ("record", began, recorded), ("gather", recorded, gathered)
        for name, start, stop in (*parts, ("forward", gathered, acted), ("scatter", acted, ended)):
            if stop > start:
                self._enter(name, _SAMPLER_LANE, start, stop)

    def step(self, worker: int, group: int, began: float, ended: float) -> None:
        """Enter a step of a worker's group, timed by the worker itself."""
        lane = _FIRST_WORKER_LANE + worker
        if lane not in self._lanes:
            self._name_lane(lane, f"worker {worker}")
        self._enter(f"step group {group}", lane, began, ended)

    def request(self, number: int, called: float, begun: float | None, ended: float) -> None:
        """Enter a request: the wait for its first row, and the sampling of its episodes."""
        spans = [("waiting", called, ended if begun is None else begun)]
        if begun is not None:
            spans.append(("sampling", begun, ended))
        for name, start, stop in spans:
            for phase, at in (("b", start), ("e", stop)):
                self._put(
                    name=name, cat="request", ph=phase, id=number, ts=at * 1e6, tid=_SAMPLER_LANE
                )

    def count(self, at: float, **numbers: int) -> None:
        """Enter the values of counters at a time."""
        for name, value in numbers.items():
            self._put(name=name, ph="C", ts=at * 1e6, tid=_SAMPLER_LANE, args={name: value})

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Enter what the block does, in the lane of the calling thread."""
        lane = _FIRST_THREAD_LANE + threading.get_native_id()
        if lane not in self._lanes:
            self._name_lane(lane, threading.current_thread().name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._enter(name, lane, began, time.perf_counter())

    def close(self) -> None:
        """Write what is left. Idempotent; what is entered later is dropped."""
        with self._lock:
            self._flush()
            self._write("[]\n" if self._is_first else "\n]\n")
            with suppress(OSError):
                self._file.close()

    def _name_lane(self, lane: int, name: str) -> None:
        self._lanes.add(lane)
        self._put(name="thread_name", ph="M", tid=lane, args={"name": name})
        self._put(name="thread_sort_index", ph="M", tid=lane, args={"sort_index": lane})

    def _enter(self, name: str, lane: int, began: float, ended: float, **args: Any) -> None:
        self._put(
            name=name,
            ph="X",
            ts=began * 1e6,
            dur=(ended - began) * 1e6,
            tid=lane,
            **({"args": args} if args else {}),
        )

    def _put(self, **event: Any) -> None:
        line = json.dumps({"pid": self._process, **event})
        with self._lock:
            if self._file.closed:
                return
            self._events.append(line)
            if len(self._events) >= _EVENTS_AT_ONCE:
                self._flush()

    def _flush(self) -> None:
        if self._events:
            begin = "[\n" if self._is_first else ",\n"
            self._is_first = False
            self._write(begin + ",\n".join(self._events))
            self._events.clear()

    def _write(self, text: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:  # a trace is no reason to lose what is sampled
            _LOG.warning("the trace %s ends here: %s", self._file.name, error)
            with suppress(OSError):
                self._file.close()
