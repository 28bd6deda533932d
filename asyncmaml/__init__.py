"""An asyncio-driven sampler framework for (meta-)reinforcement learning in PyTorch.

The public names are imported when they are first used: a worker process passes through here,
and must not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncmaml.config import TrainConfig
    from asyncmaml.episodes import BatchEpisodes
    from asyncmaml.errors import AsyncMAMLError
    from asyncmaml.evaluation import EvaluationReport, evaluate
    from asyncmaml.learning.policies import (
        CategoricalMLPPolicy,
        MultiCategoricalMLPPolicy,
        NormalMLPPolicy,
    )
    from asyncmaml.learning.policy_files import load_policy
    from asyncmaml.learning.policy_spaces import policy_for_spaces
    from asyncmaml.sampling.lockstep import BatchSampler
    from asyncmaml.sampling.sampler import AsyncSampler
    from asyncmaml.sampling.statistics import Statistics
    from asyncmaml.trainer import TrainResult, train

__version__ = "0.1.0"

_HOMES = {
    "AsyncMAMLError": "asyncmaml.errors",
    "AsyncSampler": "asyncmaml.sampling.sampler",
    "BatchEpisodes": "asyncmaml.episodes",
    "BatchSampler": "asyncmaml.sampling.lockstep",
    "CategoricalMLPPolicy": "asyncmaml.learning.policies",
    "EvaluationReport": "asyncmaml.evaluation",
    "MultiCategoricalMLPPolicy": "asyncmaml.learning.policies",
    "NormalMLPPolicy": "asyncmaml.learning.policies",
    "Statistics": "asyncmaml.sampling.statistics",
    "TrainConfig": "asyncmaml.config",
    "TrainResult": "asyncmaml.trainer",
    "evaluate": "asyncmaml.evaluation",
    "load_policy": "asyncmaml.learning.policy_files",
    "policy_for_spaces": "asyncmaml.learning.policy_spaces",
    "train": "asyncmaml.trainer",
}

__all__ = [
    "AsyncMAMLError",
    "AsyncSampler",
    "BatchEpisodes",
    "BatchSampler",
    "CategoricalMLPPolicy",
    "EvaluationReport",
    "MultiCategoricalMLPPolicy",
    "NormalMLPPolicy",
    "Statistics",
    "TrainConfig",
    "TrainResult",
    "evaluate",
    "load_policy",
    "policy_for_spaces",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
