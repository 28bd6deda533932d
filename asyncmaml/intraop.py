"""The number of intra-op threads of one thread alone; one, for the forwards of the samplers.

There a row's result must not show who shares its forward. A matrix product picks its kernel by the
number of rows, and kernels differ in the last bits. With one intra-op thread and a number of rows
that is a multiple of `ROW_BLOCK`, a row of a float32 product is bitwise the same in every batch
(measured for `linear` on MKL with AVX-512, layer widths 1 to 256, 16 to 512 rows: no difference;
with multiples of 8, 8 rows differ from 16 for widths 2, 3 and 10; unpadded, a head of width 2
differs up to 15 rows and one of width 1 beyond). A test sweeps it on the machine at hand. How rows
are laid out beyond that: `row_places`.

`torch.set_num_threads(1)` would be no cure for the threads: it also sets the global number of
MKL, so the caller's learner would lose its threads. OpenMP's number is per thread, and MKL has
one per thread too; both are reached through the library that torch itself has loaded. The pool's
threads would also spin on the cores that the workers need.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

ROW_BLOCK = 16
"""Forwards are padded to a multiple of this many rows."""


@cache
def _library() -> ctypes.CDLL | None:
    """Return torch's CPU library if it offers both thread-local limits."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            library = ctypes.CDLL(str(path))
            library.omp_set_num_threads  # noqa: B018  (raises where the symbol is missing)
            library.omp_get_max_threads  # noqa: B018
        except (OSError, AttributeError):
            continue
        return library
    return None


def can_limit_one_thread() -> bool:
    """Whether `intraop_threads` can do what it says."""
    return _library() is not None


@contextmanager
def intraop_threads(number: int) -> Iterator[None]:
    """Give the calling thread so many intra-op threads; nothing changes where that cannot be."""
    # The first call in a thread copies torch's global number into it, which would undo ours.
    before = torch.get_num_threads()
    library = _library()
    if library is None:
        yield
        return
    set_mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    library.omp_set_num_threads(number)
    mkl_before = set_mkl(number) if set_mkl is not None else 0
    try:
        yield
    finally:
        library.omp_set_num_threads(before)
        if set_mkl is not None:
            set_mkl(mkl_before)


@contextmanager
def one_intraop_thread() -> Iterator[int]:
    """Limit the calling thread to one intra-op thread; yield the block to pad forwards to.

    Where the libraries offer no limit per thread, all threads stay, and the block grows so that
    each of them gets whole blocks.
    """
    block = ROW_BLOCK if can_limit_one_thread() else ROW_BLOCK * torch.get_num_threads()
    with intraop_threads(1):
        yield block
