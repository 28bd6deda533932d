"""Work on many tasks at once: some threads, each with its share of torch's intra-op threads.

Within one product torch's threads meet after every operation, tens of thousands of times in an
outer step, and where another process runs on one of the cores, each of these meetings waits for its
turn. Tasks need to meet only where they are summed up. The outer step of Navigation2D in the
paper's set-up (20 tasks, 2 cores): 3.4 s where torch's own threads take 3.9 s; beside a process
that computes on one of the cores 4.4 to 6.2 s for 11 to 12 s; beside a test suite 6 s for 20 to 64.

Who sums up does so in the order of the tasks, so it does not show which thread took which task. The
number of threads may show in the last bits as it always did: large tasks that are fewer than the
cores, and the long vectors of who sums up, are torch's to split.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from asyncmaml.intraop import can_limit_one_thread, intraop_threads

Item = TypeVar("Item")
Result = TypeVar("Result")


class ForEach(Protocol):
    """Calls a function for each of some items; see `in_turn` and `at_once`."""

    def __call__(
        self, function: Callable[[Item], Result], items: Sequence[Item], /
    ) -> list[Result]:
        """Return what the function makes of each item, in their order."""


def in_turn(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return what a function makes of each item, one after the other."""
    return [function(item) for item in items]


def at_once(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return what a function makes of each item, in their order; several at once.

    As many threads as torch has in the calling one, `torch.get_num_threads()`.

    Args:
        function: Gets items in any order; changes nothing that another call of it reads.
        items: Of about the same size.

    Raises:
        BaseException: What the function raised for the first item for which it did.
    """
    num_cores = torch.get_num_threads()
    num_threads = min(num_cores, len(items))
    if num_threads < 2 or not can_limit_one_thread():
        return in_turn(function, items)
    share = num_cores // num_threads

    def limited(item: Item) -> Result:
        with intraop_threads(share):
            return function(item)

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="asyncmaml-tasks")
    try:
        return list(pool.map(limited, items))
    finally:
        pool.shutdown(cancel_futures=True)
