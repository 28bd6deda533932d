"""The memory of this process and its descendants, looked at again and again by a thread.

Counted is the proportional set size: a page that several processes map counts in each of them by
its share, so that the sum is what all of them take together. A look walks the page tables, some
12 ms for each GiB: whoever is timed meanwhile would feel it.
"""

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from measuring import descendants

_LOOKS_PER_SECOND = 10


def kibibytes(text: str, name: str) -> int:
    """Return a number of `/proc/PID/status` or `smaps_rollup`, such as "VmRSS" or "Pss"."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None, f"no {name} in {text!r}"
    return int(found[1])


@dataclass(frozen=True)
class Memory:
    """KiB."""

    all_processes: int
    """This one and its descendants."""
    this_process: int

    @classmethod
    def now(cls) -> Self:
        """Look."""
        mine = _proportional_kibibytes("self")
        theirs = sum(map(_proportional_kibibytes, _living_descendants()))
        return cls(mine + theirs, mine)

    def peak_with(self, other: "Memory") -> "Memory":
        """Return the greater of each number; the peaks may be of different moments."""
        return Memory(
            max(self.all_processes, other.all_processes),
            max(self.this_process, other.this_process),
        )


def _living_descendants() -> list[int]:
    found = []
    try:
        for pid in descendants("self"):
            found.append(pid)
    except (FileNotFoundError, ProcessLookupError):
        pass  # one has ended meanwhile; those found before it are kept
    return found


def _proportional_kibibytes(pid: int | str) -> int:
    try:
        return kibibytes(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0


class MemoryWatch:
    """Looks at the memory while its block runs; `peak` is the greatest that it saw."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self.peak = Memory.now()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            is_over = self._over.wait(1 / _LOOKS_PER_SECOND)
            # Once more at the end, too: what is there then is in the peak for sure.
            self.peak = self.peak.peak_with(Memory.now())
            if is_over:
                return


def greatest_resident_kibibytes() -> int:
    """Return this process's greatest resident size since it began, as the kernel counts it."""
    return kibibytes(Path("/proc/self/status").read_text(), "VmHWM")
