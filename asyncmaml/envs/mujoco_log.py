"""MuJoCo's log, kept quiet while an environment is constructed.

MuJoCo 4 says of HalfCheetah's model that one of its attributes is deprecated: for each
environment a line on file descriptor 2, and one more in a file MUJOCO_LOG.TXT in the working
directory. A handler of ours takes the place of MuJoCo's while environments are constructed. What
is said of deprecated attributes ends there, all else becomes a Python warning. Afterwards MuJoCo's
own handler is back, so a simulation that turns unstable says so as it always does.
"""

import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


@contextmanager
def quiet_mujoco() -> Iterator[None]:
    """Hold MuJoCo's log in this block, in all threads, without importing MuJoCo.

    A handler that the user has set by `mujoco.set_mju_user_warning` stays and hears everything.
    Blocks may be nested and may overlap in several threads; the last one out ends it.

    Warns:
        RuntimeWarning: MuJoCo said something else than that an attribute is deprecated.
    """
    _log.hold()
    try:
        yield
    finally:
        messages = _log.release()
    for message in messages:
        if "is deprecated" not in message:
            warnings.warn(f"MuJoCo: {message}", RuntimeWarning, stacklevel=3)


class _MujocoLog(MetaPathFinder):
    """The handler, and the finder that sets it when MuJoCo is first imported inside a block."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_blocks = 0
        self._mujoco: ModuleType | None = None  # while its handler is ours
        self._messages: list[str] = []

    def hold(self) -> None:
        with self._lock:
            self._num_blocks += 1
            if self._num_blocks == 1:
                if sys.modules.get("mujoco") is not None:
                    self._set_handler(sys.modules["mujoco"])
                else:
                    sys.meta_path.insert(0, self)

    def release(self) -> Sequence[str]:
        with self._lock:
            self._num_blocks -= 1
            if self._num_blocks > 0:
                return ()
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            if self._mujoco is not None:
                self._mujoco.set_mju_user_warning(None)
                self._mujoco = None
            messages, self._messages = self._messages, []
            return messages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find MuJoCo as usual, and set the handler once it is imported."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "mujoco" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_hold(module: ModuleType) -> None:
            execute(module)
            self._set_handler(module)

        spec.loader.exec_module = execute_and_hold  # type: ignore[method-assign]
        return spec

    def _set_handler(self, mujoco: ModuleType) -> None:
        with self._lock:
            if self._num_blocks > 0 and mujoco.get_mju_user_warning() is None:
                # It only keeps the message: what a handler raises, a warning turned into an error
                # for one, would unwind MuJoCo's C code, which aborts the process.
                mujoco.set_mju_user_warning(self._messages.append)
                self._mujoco = mujoco


_log = _MujocoLog()
