"""Where the wall time of an iteration went, told from spans of time that overlap."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

Span = tuple[float, float]
"""Begin and end in seconds of `time.perf_counter`."""


def union(spans: Sequence[Span]) -> list[Span]:
    """Return the time that any of the spans covers, as spans that are apart and in order."""
    apart: list[Span] = []
    for begin, end in sorted(spans):
        if apart and begin <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((begin, end))
    return apart


def seconds_of(spans: Sequence[Span]) -> float:
    """Return how much time any of the spans covers."""
    return sum(end - begin for begin, end in union(spans))


def seconds_of_both(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Return how much time is covered by spans of the first as well as of the second."""
    return seconds_of(first) + seconds_of(second) - seconds_of([*first, *second])


@dataclass
class Clock:
    """Notes when what ran; a span is added when it has ended, from whatever thread it ran in."""

    begin: float = field(default_factory=time.perf_counter)
    sampling: list[Span] = field(default_factory=list)
    """Requests in flight."""
    adaptation: list[Span] = field(default_factory=list)
    """The learner's thread at baselines, advantages and inner updates."""
    outer: list[Span] = field(default_factory=list)
    """The learner's thread at the outer update."""

    def seconds(self) -> dict[str, float]:
        """Divide the time since `begin`; the four parts add up to `seconds`.

        Adaptation that is hidden behind sampling counts as sampling, and is told beside it as
        `overlap_seconds`. Idle is when neither the sampler nor the learner had work.
        """
        total = time.perf_counter() - self.begin
        sampling = seconds_of(self.sampling)
        overlap = seconds_of_both(self.sampling, self.adaptation)
        adaptation = seconds_of(self.adaptation) - overlap
        outer = seconds_of(self.outer)
        return {
            "seconds": total,
            "sampling_seconds": sampling,
            "adaptation_seconds": adaptation,
            "outer_seconds": outer,
            "idle_seconds": max(0.0, total - sampling - adaptation - outer),
            "overlap_seconds": overlap,
        }


@contextmanager
def noted(spans: list[Span]) -> Iterator[None]:
    """Add the span of the block, even if it raises."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        spans.append((begin, time.perf_counter()))
