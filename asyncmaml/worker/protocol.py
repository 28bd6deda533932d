"""The messages between the coordinator and a worker, and their legal order. No input or output.

Arrays never cross the pipe: they lie in shared memory, and a message says whose turn it is. From
a command until its reply the arrays belong to the worker; from the reply until the next command
they belong to the coordinator.

A worker's rows are in groups, each with arrays of its own: while one group steps, the actions of
the other are computed. Commands to different groups may be on their way at the same time; the
worker does them in the order in which they were sent.

    coordinator                      worker
    SETUP  how to make envs ------>  make the first environment
                            <------  READY  spaces, rows of each group
    ATTACH, with descriptor ------>  map the shared arrays
    TASK   number, task     ------>  keep it         (any number of these, no reply)
    FORGET number           ------>  drop it         (any number of these, no reply)
    STEP group              ------>  do the order of each of the group's rows
                            <------  FAILED  the rows that raised, why   (only if some did)
                            <------  STEPPED group
    CLOSE                   ------>  close the environments and end

In place of READY a worker may answer FAILED and end. The end of the pipe means CLOSE.

A frame is a length (4 bytes, little endian), a kind (1 byte) and that many bytes of payload.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("<IB")


class Kind(enum.IntEnum):
    """What a message says."""

    SETUP = 1
    READY = 2
    ATTACH = 3
    TASK = 4
    FORGET = 5
    STEP = 6
    FAILED = 7
    STEPPED = 8
    CLOSE = 9


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return the bytes of one message."""
    return _HEADER.pack(len(payload), kind) + payload


CLOSE = frame(Kind.CLOSE)
MAX_GROUPS = 8
STEP = tuple(frame(Kind.STEP, bytes((group,))) for group in range(MAX_GROUPS))
STEPPED = tuple(frame(Kind.STEPPED, bytes((group,))) for group in range(MAX_GROUPS))


class FrameReader:
    """Cuts a stream of bytes into messages; a message may arrive in any number of pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_between_messages(self) -> bool:
        """Whether no part of a message is held."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yield the messages that are whole once `data` has been added."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(buffer)
            end = _HEADER.size + length
            if len(buffer) < end:
                return
            payload = bytes(buffer[_HEADER.size : end])
            del buffer[:end]
            yield Kind(kind), payload


class Order(enum.IntEnum):
    """What a row is to do on STEP."""

    IDLE = 0
    STEP = 1
    START = 2
    """Begin the episode that `Arrays.start_seed` and `start_task` name."""


class Outcome(enum.IntFlag):
    """What became of a row on STEP; 0 where its episode goes on."""

    TERMINATED = 1
    TRUNCATED = 2
    NEXT = 4
    """The row took the next offer and has begun it."""
    FAILED = 8
    """The environment raised; a FAILED message says why."""


NO_TASK = -1
"""The task number of an episode that is run in the environment's own, initial task."""


@dataclass(frozen=True)
class RowFailure:
    """Why a row failed; plain text, since an exception may not survive pickling."""

    row: int
    phase: str
    """`constructor`, `reset_task`, `reset` or `step`."""
    error: str
    """The exception's type and text, or what was wrong with the data."""
    remote_traceback: str
    not_finite: bool = False
    out_of_space: bool = False
    of_next: bool = False
    """The row finished its episode, and failed when it began the one it had taken."""
