"""MuJoCo comes with an extra of ours; who needs it and finds it missing says so here."""

from collections.abc import Iterator
from contextlib import contextmanager

from gymnasium.error import DependencyNotInstalled

from asyncmaml.errors import MissingExtraError


@contextmanager
def mujoco_required(who: str) -> Iterator[None]:
    """Say which extra brings MuJoCo, around what imports it or makes an environment.

    Raises:
        MissingExtraError: MuJoCo is not installed; `who` needs it. Other packages that are
            missing are told as they are.
    """
    try:
        yield
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        if "mujoco" not in str(error).lower():
            raise
        raise MissingExtraError.naming(who, "MuJoCo", "asyncmaml[mujoco]") from error
