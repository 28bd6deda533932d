"""Some environments need packages of our extras; who finds one missing says here which extra."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from gymnasium.error import DependencyNotInstalled

from asyncmaml.errors import MissingExtraError

_NAMES = {"metaworld": "Meta-World", "mujoco": "MuJoCo", "packaging": "packaging"}


def mujoco_required(who: str) -> AbstractContextManager[None]:
    """Say which extra brings MuJoCo, around what imports it or makes an environment.

    Raises:
        MissingExtraError: MuJoCo is not installed; `who` needs it. Other packages that are
            missing are told as they are.
    """
    return _required(who, "asyncmaml[mujoco]", "mujoco")


def metaworld_required(who: str) -> AbstractContextManager[None]:
    """Say which extra brings Meta-World and what that imports, around the import.

    Raises:
        MissingExtraError: One of them is not installed; `who` needs it. Meta-World 3.1.1 does not
            say itself that it needs packaging.
    """
    return _required(who, "asyncmaml[metaworld]", "metaworld", "mujoco", "packaging")


@contextmanager
def _required(who: str, extra: str, *packages: str) -> Iterator[None]:
    try:
        yield
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = [package for package in packages if package in str(error).lower()]
        if not missing:
            raise
        raise MissingExtraError.naming(who, _NAMES[missing[0]], extra) from error
