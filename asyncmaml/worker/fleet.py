"""All rows of one worker, in groups, single or vectorised as the environment offers it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import gymnasium

from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.rows import RowVectorEnv
from asyncmaml.envs.tasks import has_tasks
from asyncmaml.worker.layout import Arrays
from asyncmaml.worker.rows import Rows
from asyncmaml.worker.single_rows import SingleRows
from asyncmaml.worker.vector_rows import VectorRows

DEFAULT_ROWS = 128
"""Rows of a worker of single environments where the user names no number."""
DEFAULT_VECTOR_ROWS = 256
"""The same for a natively vectorised environment."""


@dataclass(frozen=True)
class Fleet:
    """All rows of one worker, and what is known of their environments."""

    groups: list[Rows]
    tasks: dict[int, Any]
    """Known to all groups; kept and forgotten as the coordinator says."""
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    has_tasks: bool
    check_spaces: bool

    @classmethod
    def make(
        cls,
        maker: EnvMaker,
        num_rows: int | None,
        num_groups: int | None,
        *,
        check_spaces: bool = False,
    ) -> Self:
        """Make the rows of one worker, vectorised where the environment offers it.

        Args:
            maker: Makes the environments.
            num_rows: In all groups together; None: the default.
            num_groups: None: two, so that the worker has work while the coordinator computes;
                one for vectorised environments, whose steps are cheaper than a second message.
            check_spaces: Fail a row whose observation or action lies outside of its space.
        """
        tasks: dict[int, Any] = {}
        sizes = _shares(num_rows or DEFAULT_VECTOR_ROWS, num_groups or 1)
        vector_env = maker.make_rows(sizes[0])
        if vector_env is not None:
            groups: list[Rows] = [VectorRows(vector_env, tasks)]
            for size in sizes[1:]:
                more = maker.make_rows(size)
                assert more is not None
                groups.append(VectorRows(more, tasks))
            own = getattr(type(vector_env), "reset_task", RowVectorEnv.reset_task)
            takes_tasks = own is not RowVectorEnv.reset_task
            spaces = vector_env.single_observation_space, vector_env.single_action_space
            return cls(groups, tasks, *spaces, takes_tasks, check_spaces)
        first = maker.make()
        groups = []
        for size in _shares(num_rows or DEFAULT_ROWS, num_groups or 2):
            groups.append(SingleRows(maker, size, tasks, None if groups else first))
        spaces = first.observation_space, first.action_space
        return cls(groups, tasks, *spaces, has_tasks(first), check_spaces)

    def attach(self, views: Sequence[Arrays]) -> None:
        """Work on these arrays, one of each group, from now on."""
        spaces = (self.observation_space, self.action_space) if self.check_spaces else None
        for group, arrays in zip(self.groups, views, strict=True):
            group.attach(arrays, spaces)

    def close(self) -> None:
        """Close the environments."""
        for group in self.groups:
            group.close()


def _shares(num_rows: int, num_groups: int) -> list[int]:
    """Divide rows among groups, of which none is empty."""
    num_groups = min(num_groups, num_rows)
    return [(num_rows + index) // num_groups for index in reversed(range(num_groups))]
