"""Where a run's randomness comes from: a number for everything that is drawn.

With the configuration's seed as the sampler's root, the number alone decides what is drawn. So
nothing depends on the timing, on the number of workers, or on where a run was stopped and
resumed; and there is no state of a generator to keep.
"""

import enum

from asyncmaml.errors import ConfigurationError

_TASK_BITS, _UPDATE_BITS, _PURPOSE_BITS = 20, 10, 4


class Purpose(enum.IntEnum):
    """What is drawn for; each has its own tasks and episodes."""

    TRAINING = 0
    EVALUATION = 1
    """Held-out tasks while training."""
    FINAL_EVALUATION = 2
    """Held-out tasks of `evaluate()`."""
    PICTURE = 3
    """What is drawn or filmed."""


def draw_number(purpose: Purpose, iteration: int, task: int = 0, update: int = 0) -> int:
    """Return the seed of one `sample()`, or of one draw of tasks: a different one for each.

    Args:
        purpose: What for.
        iteration: From 0; any.
        task: Index within the iteration.
        update: Inner updates that the parameters have behind them.

    Raises:
        ConfigurationError: There are more tasks or updates than there are numbers for.
    """
    if task >> _TASK_BITS or update >> _UPDATE_BITS:
        message = (
            f"task {task} after {update} updates has no number of its own: an iteration may have "
            f"{1 << _TASK_BITS:,} tasks and {1 << _UPDATE_BITS:,} updates; take fewer"
        )
        raise ConfigurationError(message)
    number = iteration << _TASK_BITS | task
    number = number << _UPDATE_BITS | update
    return number << _PURPOSE_BITS | purpose
