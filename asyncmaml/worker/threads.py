"""How many threads numeric libraries make in a worker. Imports nothing that loads one."""

import os


def one_numeric_thread() -> None:
    """Have the numeric libraries that are loaded from now on use one thread each.

    A worker has one core's worth of work. A number that the user has set stands.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
