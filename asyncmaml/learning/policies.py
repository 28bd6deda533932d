"""The policies: an `MLPPolicy` for each kind of action (one choice, numbers, several choices)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - what every torch user calls it
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from asyncmaml.learning.mlp import MLPPolicy, Nonlinearity, Params
from asyncmaml.option_kinds import Many, Real, Whole

__all__ = ["CategoricalMLPPolicy", "MLPPolicy", "MultiCategoricalMLPPolicy", "NormalMLPPolicy"]

_NVEC = Many(Whole(1), "NVEC", "one whole number of at least 1 for each choice")


class CategoricalMLPPolicy(MLPPolicy):
    """One of `output_size` actions: `Categorical` over the network's logits."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_sizes: Sequence[int] = (100, 100),
        nonlinearity: Nonlinearity | str = F.relu,
        *,
        observation_ndim: int = 1,
        observation_start: int = 0,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            hidden_sizes,
            nonlinearity,
            observation_ndim=observation_ndim,
            observation_start=observation_start,
        )

    def _distribution(self, outputs: Tensor, params: Params) -> Distribution:
        return _Logits(outputs)

    def _arguments(self) -> dict[str, Any]:
        return {"output_size": self.output_size}


class _Logits(Categorical):
    """`Categorical(logits=...)` whose normalisation is one pass over the logits and not three."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = self._param = logits.log_softmax(-1)
        self._num_events = logits.shape[-1]
        Distribution.__init__(self, logits.shape[:-1], validate_args=False)

    def expand(
        self, batch_shape: "torch.Size | Sequence[int]", _instance: Any = None
    ) -> Categorical:
        """See `Categorical`."""
        logits = self.logits.expand(torch.Size(batch_shape) + self.logits.shape[-1:])
        return Categorical(logits=logits, validate_args=False)


class NormalMLPPolicy(MLPPolicy):
    """`output_size` independent normal numbers; their spread does not depend on the observation.

    The scale is `exp(max(sigma, log(min_std)))`. Below that floor the gradient of `sigma` is
    zero, so a `sigma` that an update carried below it stays there.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_sizes: Sequence[int] = (100, 100),
        nonlinearity: Nonlinearity | str = F.relu,
        *,
        init_std: float = 1.0,
        min_std: float = 1e-6,
        observation_ndim: int = 1,
        observation_start: int = 0,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            hidden_sizes,
            nonlinearity,
            observation_ndim=observation_ndim,
            observation_start=observation_start,
            head="mu",
        )
        self.init_std: float = Real(0, above=True).check("init_std", init_std)
        self.min_std: float = Real(0, above=True).check("min_std", min_std)
        self._min_log_std = math.log(self.min_std)
        self.sigma = nn.Parameter(torch.full((self.output_size,), math.log(self.init_std)))

    def _distribution(self, outputs: Tensor, params: Params) -> Distribution:
        scale = params["sigma"].clamp(min=self._min_log_std).exp()
        if scale.ndim == 2:
            scale = scale.reshape(len(scale), *[1] * (outputs.ndim - 2), -1)
        return Independent(_Numbers(outputs, scale), 1, validate_args=False)

    def _arguments(self) -> dict[str, Any]:
        return {
            "output_size": self.output_size,
            "init_std": self.init_std,
            "min_std": self.min_std,
        }


class _Numbers(Normal):
    """`Normal(loc, scale)`, a third of whose time goes into finding out the shape of both."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale.expand_as(loc)
        Distribution.__init__(self, loc.shape, validate_args=False)

    def expand(self, batch_shape: "torch.Size | Sequence[int]", _instance: Any = None) -> Normal:
        """See `Normal`."""
        shape = torch.Size(batch_shape)
        return Normal(self.loc.expand(shape), self.scale.expand(shape), validate_args=False)


class MultiCategoricalMLPPolicy(MLPPolicy):
    """Several choices at once, `nvec[i]` actions for the i-th: independent `Categorical`.

    The logits of a choice with fewer actions than the largest are padded with the lowest finite
    number: its probability is exactly 0, and unlike minus infinity it leaves the gradient of the
    KL divergence finite (infinity minus infinity, times a probability of 0, is NaN).
    """

    _places: Tensor

    def __init__(
        self,
        input_size: int,
        nvec: Sequence[int],
        hidden_sizes: Sequence[int] = (100, 100),
        nonlinearity: Nonlinearity | str = F.relu,
        *,
        observation_ndim: int = 1,
        observation_start: int = 0,
    ) -> None:
        counts: tuple[int, ...] = _NVEC.check("nvec", nvec)
        total = sum(counts)
        super().__init__(
            input_size,
            total,
            hidden_sizes,
            nonlinearity,
            observation_ndim=observation_ndim,
            observation_start=observation_start,
        )
        self.nvec = counts
        # Which output is the logit of each action; `total` is the padding put behind them.
        places = torch.full((len(self.nvec), max(self.nvec)), total)
        is_action = torch.arange(max(self.nvec)) < torch.tensor(self.nvec).unsqueeze(1)
        places[is_action] = torch.arange(total)
        self.register_buffer("_places", places, persistent=False)

    def _distribution(self, outputs: Tensor, params: Params) -> Distribution:
        padded = F.pad(outputs, (0, 1), value=torch.finfo(outputs.dtype).min)
        choices = Categorical(logits=padded[..., self._places], validate_args=False)
        return Independent(choices, 1, validate_args=False)

    def _arguments(self) -> dict[str, Any]:
        return {"nvec": self.nvec}
