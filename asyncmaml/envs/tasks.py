"""The tasks of an environment, asked through its wrappers.

A task environment has `sample_tasks(num_tasks) -> list` and `reset_task(task)`; Meta-World
calls the second one `set_task`. One that keeps some of its tasks from training has
`sample_held_out_tasks(num_tasks)` as well.
"""

from typing import Any

import gymnasium

from asyncmaml.errors import ConfigurationError

_SETTERS = ("reset_task", "set_task")


def has_tasks(env: gymnasium.Env[Any, Any]) -> bool:
    """Tell whether tasks can be drawn from the environment and given to it."""
    return env.has_wrapper_attr("sample_tasks") and _setter_of(env) is not None


def sample_tasks(
    env: gymnasium.Env[Any, Any], num_tasks: int, seed: int | None, *, held_out: bool = False
) -> list[Any]:
    """Draw tasks from the environment's distribution; the same seed gives the same tasks.

    Resets the environment, since that is how Gymnasium seeds the generator.

    Args:
        env: A task environment.
        num_tasks: How many.
        seed: Of the draw; None: the environment goes on where it is.
        held_out: Draw them from those that the environment keeps from training, if it does. In
            other families each draw comes from one and the same distribution.

    Raises:
        ConfigurationError: The environment has no tasks, or did not return `num_tasks` of them.
    """
    if not env.has_wrapper_attr("sample_tasks"):
        message = (
            f"no tasks can be drawn from {env}: it has no sample_tasks(num_tasks); "
            "add that method to the environment, or make the tasks yourself"
        )
        raise ConfigurationError(message)
    env.reset(seed=seed)
    name = "sample_tasks"
    if held_out and env.has_wrapper_attr("sample_held_out_tasks"):
        name = "sample_held_out_tasks"
    tasks = env.get_wrapper_attr(name)(num_tasks)
    if not isinstance(tasks, list) or len(tasks) != num_tasks:
        found = f"{len(tasks)} of them" if isinstance(tasks, list) else f"{tasks!r}"
        message = (
            f"{name}({num_tasks}) of {env} must return a list of {num_tasks} tasks and "
            f"returned {found}; correct the environment"
        )
        raise ConfigurationError(message)
    return tasks


def reset_task(env: gymnasium.Env[Any, Any], task: Any) -> None:
    """Give the environment a task, which it keeps over its resets.

    Raises:
        ConfigurationError: The environment has no tasks, or cannot take this one.
    """
    env.get_wrapper_attr(task_setter(env))(task)


def task_setter(env: gymnasium.Env[Any, Any]) -> str:
    """Return the name of the method that gives the environment a task.

    Raises:
        ConfigurationError: It has none.
    """
    setter = _setter_of(env)
    if setter is None:
        message = (
            f"{env} was given a task and has neither reset_task(task) nor set_task(task); leave "
            "the task out, or add one of them to the environment"
        )
        raise ConfigurationError(message)
    return setter


def _setter_of(env: gymnasium.Env[Any, Any]) -> str | None:
    return next((name for name in _SETTERS if env.has_wrapper_attr(name)), None)
