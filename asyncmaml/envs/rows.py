"""The protocol of a natively vectorised environment: rows that know nothing of each other.

Gymnasium leaves open how the rows of a vector environment share randomness and when an ended
row is reset. The sampler needs one answer: a row gives, bit for bit, what the single
environment gives under the same seed, task and actions, whoever its neighbours are. So a class
says of itself that it keeps this protocol, with two entries of its `metadata`:

    "autoreset_mode": AutoresetMode.DISABLED   an ended row waits until it is reset by mask
    "row_seeds": True                          each row is reset from a seed of its own

Gymnasium's `CartPoleVectorEnv` keeps neither: its rows draw from one generator, and an ended
row resets itself in the next step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from asyncmaml.errors import ConfigurationError


class RowVectorEnv(VectorEnv[NDArray[Any], NDArray[Any], NDArray[Any]], ABC):
    """A vector environment whose rows are independent of each other.

    What an author promises, beyond Gymnasium's `VectorEnv`:

    - One dynamics function serves this class and the single environment. Then they agree bit
      for bit by construction, and a test over ragged episodes can hold them to it.
    - `reset` touches no row outside of its mask; `step` touches no row but by its own action.
    - A row that has ended is stepped along until it is reset, with any action. What it returns
      means nothing, but it must neither raise nor warn.
    - What `reset` and `step` return belongs to the caller: later calls do not write into it.
    - A row's task survives its resets.
    - Each row counts its own steps and is truncated after `max_episode_steps` (None: never), as
      `TimeLimit` does for the single environment: `terminated` may be true as well.

    The constructor takes `num_envs`, `max_episode_steps` and the single environment's keywords.

    Args:
        num_envs: Rows, R.
        single_observation_space: The single environment's.
        single_action_space: The single environment's.
        max_episode_steps: Steps after which a row is truncated; None: never.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - Gymnasium declares it as an instance's
        "render_modes": [],
        "autoreset_mode": AutoresetMode.DISABLED,
        "row_seeds": True,
    }

    def __init__(
        self,
        num_envs: int,
        single_observation_space: Space[Any],
        single_action_space: Space[Any],
        max_episode_steps: int | None,
    ) -> None:
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.single_observation_space = single_observation_space
        self.single_action_space = single_action_space
        self.observation_space = batch_space(single_observation_space, num_envs)
        self.action_space = batch_space(single_action_space, num_envs)

    @abstractmethod
    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset the masked rows, each as the single environment would be with the row's seed.

        Args:
            seed: One for each of the R rows (those of rows outside the mask are not looked at;
                None: go on with the row's generator), or `seed + row` for an integer.
            options: `{"reset_mask": mask}` with a bool array of shape `(R,)`; without it, all.

        Returns:
            The observations of all rows, shape `(R, *O)`, and `{}`.
        """

    @abstractmethod
    def step(
        self, actions: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step every row, idle ones too.

        Args:
            actions: Shape `(R, *A)`; the caller's, not written to.

        Returns:
            Observations `(R, *O)`, rewards, terminated and truncated `(R,)`, and `{}`.
        """

    def reset_task(self, task: Any, mask: NDArray[np.bool_] | None = None) -> None:
        """Give one task to the masked rows (None: to all); their states stay as they are.

        Raises:
            ConfigurationError: The environment has no tasks, or cannot take this one.
        """
        message = (
            f"{type(self).__name__} was given the task {task!r} but has no tasks; leave the "
            "task out, or implement reset_task(task, mask)"
        )
        raise ConfigurationError(message)

    def restore_task(self, mask: NDArray[np.bool_]) -> None:
        """Give the masked rows the task that their constructor gave them."""
        message = f"{type(self).__name__} has tasks; implement restore_task(mask) as well"
        raise ConfigurationError(message)


def checked_choices(
    who: str, actions: ArrayLike, num_choices: int, is_running: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return actions of a `Discrete` space, any action of a row that does not run made valid.

    numpy's indexing would take -1 for the last choice without a word.

    Args:
        who: The environment, for the message.
        actions: Shape `(R,)`.
        num_choices: Valid are 0 to `num_choices - 1`.
        is_running: Shape `(R,)`.

    Raises:
        ConfigurationError: A running row's action is out of range.
    """
    choices = np.asarray(actions, np.int64)
    valid = np.clip(choices, 0, num_choices - 1)
    if wrong := choices[(choices != valid) & is_running].tolist():
        message = (
            f"{who} cannot step: the action {wrong[0]} is not in 0 to {num_choices - 1}; use a "
            f"policy for the action space Discrete({num_choices})"
        )
        raise ConfigurationError(message)
    return valid


def steps_by_row(creator: object) -> bool:
    """Tell whether what `creator` makes says of itself that its rows are independent.

    Asks the class's `metadata` and nothing else, so a class need not derive from `RowVectorEnv`.
    """
    metadata = getattr(creator, "metadata", None)
    return (
        isinstance(metadata, dict)
        and metadata.get("autoreset_mode") is AutoresetMode.DISABLED
        and metadata.get("row_seeds") is True
    )
