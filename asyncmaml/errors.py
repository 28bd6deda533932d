"""Every error that this package raises on purpose: one tree under `AsyncMAMLError`.

A caller's mistake is also a `ValueError`, `TypeError` or `RuntimeError`, so that code which
knows nothing of this package can still handle it. Below every other module; imports nothing.
"""

from typing import Any, Self


class AsyncMAMLError(Exception):
    """Base of every error of this package."""


class ConfigurationError(AsyncMAMLError, ValueError):
    """An argument is out of its range or does not fit the others."""


class UnknownEnvironmentError(ConfigurationError):
    """No environment goes by this id, or what was given is no environment."""


class UnsupportedSpaceError(AsyncMAMLError, TypeError):
    """An observation or action space of a kind that the sampler cannot carry."""


class MissingExtraError(AsyncMAMLError, ImportError):
    """A package of one of our extras is needed and not installed."""

    @classmethod
    def naming(cls, who: str, package: str, extra: str) -> Self:
        """Return the error that says who needs which package, and which extra brings it."""
        return cls(f"{who} needs {package}, which is not installed; run pip install '{extra}'")


class SamplerStateError(AsyncMAMLError, RuntimeError):
    """The sampler is not open: not started yet, or closed."""


class EventLoopError(SamplerStateError):
    """The call comes from an event loop other than the one the sampler was started in."""


class PolicyError(AsyncMAMLError, ValueError):
    """The policy's distribution does not fit the action space, or cannot be sampled by row."""


class ParameterError(PolicyError):
    """Parameters that are missing, unknown, or of the wrong shape."""


class EpisodesError(AsyncMAMLError, ValueError):
    """Data that does not fit a `BatchEpisodes`."""


class LearningError(AsyncMAMLError, ValueError):
    """What a learner was given cannot be learned from: not finite, empty, or of a wrong form."""


class OffPolicyError(LearningError):
    """Episodes come from other parameters than the learner takes them for."""


class EpisodeError(AsyncMAMLError):
    """Something went wrong inside one episode; says which.

    Attributes:
        task: The episode's task, or None.
        seed: What its environment was reset with, or None if it had not come to that.
        batch_id: Its index within its request, or None outside of an episode.
        step: The environment step, from 0; None before the first.
    """

    def __init__(
        self,
        message: str,
        *,
        task: Any = None,
        seed: int | None = None,
        batch_id: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.task = task
        self.seed = seed
        self.batch_id = batch_id
        self.step = step


class EnvironmentFailedError(EpisodeError):
    """The environment raised; `remote_traceback` is the worker's traceback as text."""

    def __init__(self, message: str, *, remote_traceback: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.remote_traceback = remote_traceback
        if remote_traceback:
            self.add_note("the worker's traceback:\n" + remote_traceback.rstrip())


class NotFiniteError(EpisodeError, ArithmeticError):
    """A NaN or an infinity in an observation, a reward or an action."""


class OutOfSpaceError(EpisodeError, ValueError):
    """An observation or an action that lies outside of its space, where that is checked."""


class WorkerError(EpisodeError):
    """A worker process failed as a whole; `stderr_tail` is what it wrote to stderr last."""

    def __init__(self, message: str, *, stderr_tail: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.stderr_tail = stderr_tail
        if stderr_tail:
            self.add_note("the worker's last words on stderr:\n" + stderr_tail)


class WorkerStartError(WorkerError):
    """A worker process did not come up."""


class WorkerDiedError(WorkerError):
    """A worker process ended by itself or was killed from outside."""


class WorkerTimeoutError(WorkerError):
    """A worker process did not answer in time and was killed."""
