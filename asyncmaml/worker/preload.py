"""What a fork server loads once for all workers that it will fork: numpy, gymnasium, our rows.

Numeric libraries make their threads when they are loaded, so the number of these is set for that
moment; the server's environment variables are afterwards what they were before.
"""

import os

from asyncmaml.worker.threads import one_numeric_thread

_before = dict(os.environ)
one_numeric_thread()
import asyncmaml.envs.making  # noqa: E402  (after the numbers are set)
import asyncmaml.worker.fleet  # noqa: E402
import asyncmaml.worker.protocol  # noqa: E402, F401

os.environ.clear()
os.environ.update(_before)
