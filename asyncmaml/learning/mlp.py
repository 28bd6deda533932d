"""`MLPPolicy`: a multi-layer perceptron whose parameters may come from outside.

`policy(observations, params)` is a function of both: `params` holds a tensor under each name of
`named_parameters()`, and None means the policy's own. Parameters with one more leading axis M are
M policies at once: the observations then carry the same leading axis, and so does the
distribution.

Layers are named `layer1`, `layer2`, ... and the head of the normal policy `mu` with `sigma`, the
logarithm of its standard deviation, as in dragen1860/MAML-Pytorch-RL and
tristandeleu/pytorch-maml-rl (`maml_rl/policies/`), whose checkpoints therefore load. From there
also the start: weights `xavier_uniform_`, biases 0.
"""

import itertools
import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import torch
import torch.nn.functional as F  # noqa: N812 - what every torch user calls it
from torch import Tensor, nn
from torch.distributions import Distribution

from asyncmaml.errors import ConfigurationError, ParameterError
from asyncmaml.option_kinds import LAYER_SIZES, Whole

_LEAST_EXACT_PRODUCT = 400
_LEAST_OUTPUTS_OF_ONE_KERNEL = 12
_FLOATS_AT_A_TIME = 32
"""By which torch computes functions of single numbers, on AVX-512; half as many on AVX2."""
_EXACT_TO_THE_END = ("relu", "leaky_relu", "tanh")
"""The nonlinearities that give the numbers left over then the same bits as all others."""

Params: TypeAlias = Mapping[str, Tensor]
Nonlinearity: TypeAlias = Callable[[Tensor], Tensor]

# By name, so that a saved policy holds plain data; the first of each is the one that runs.
NONLINEARITIES: dict[str, tuple[Nonlinearity, ...]] = {
    # In place: what it overwrites is a layer's output, which nobody else holds.
    "relu": (torch.relu_, F.relu, torch.relu),
    "tanh": (torch.tanh, F.tanh),
    "sigmoid": (torch.sigmoid, F.sigmoid),
    "elu": (F.elu,),
    "gelu": (F.gelu,),
    "leaky_relu": (F.leaky_relu,),
    "silu": (F.silu,),
    "softplus": (F.softplus,),
}


class MLPPolicy(nn.Module):
    """What the policies have in common; they differ in the distribution alone.

    `observation_ndim` tells how many trailing axes make up one observation: 1 for a vector; 0 for
    an integer index, counted from `observation_start`, which becomes one-hot; more for images,
    which are flattened. Images of uint8 are scaled to [0, 1]. All axes before are batch axes.
    """

    accepts_stacked_params: ClassVar[bool] = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_sizes: Sequence[int],
        nonlinearity: Nonlinearity | str,
        *,
        observation_ndim: int,
        observation_start: int,
        head: str | None = None,
    ) -> None:
        super().__init__()
        self.input_size: int = Whole(1).check("input_size", input_size)
        self.output_size: int = Whole(1).check("output_size", output_size)
        self.hidden_sizes: tuple[int, ...] = LAYER_SIZES.check("hidden_sizes", hidden_sizes)
        self.observation_ndim: int = Whole(0).check("observation_ndim", observation_ndim)
        self.observation_start = int(observation_start)
        self.nonlinearity_name, self.nonlinearity = _named_nonlinearity(nonlinearity)
        sizes = (self.input_size, *self.hidden_sizes, self.output_size)
        names = [f"layer{number}" for number in range(1, len(sizes))]
        names[-1] = head or names[-1]
        for name, inputs, outputs in zip(names, sizes, sizes[1:], strict=False):
            layer = nn.Linear(inputs, outputs)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
            self.add_module(name, layer)
        self._layer_names = [(f"{name}.weight", f"{name}.bias") for name in names]
        # What the sampler asks for; see `sampling/row_places`. In 16 rows of layers of even width
        # nothing is left over.
        self.has_exact_ends = self._ends_exactly(16)
        self.has_exact_places = all(
            inputs <= 4 or inputs % 4 == 0 or outputs >= _LEAST_OUTPUTS_OF_ONE_KERNEL
            for inputs, outputs in itertools.pairwise(sizes)
        )

    def forward(self, observations: Tensor, params: Params | None = None) -> Distribution:
        """Return the distribution of the action for each observation.

        Args:
            observations: Shape `(N, *O)`, `(T, B, *O)` or any other batch axes; with stacked
                parameters `(M, N, *O)` or `(M, T, B, *O)`.
            params: Used instead of the policy's own, shaped as those or all with one more
                leading axis M. Not checked here: `check_params` is for that.

        Raises:
            ParameterError: A name is missing.
        """
        if params is None:
            params = self._own_params()
        try:
            return self._distribution(self._outputs(observations, params), params)
        except KeyError:
            self.check_params(params)
            raise

    def stacks_exactly(self, num_rows: int) -> bool:
        """Tell whether stacked float32 forwards of so many rows a task are bitwise the same.

        Measured on MKL: baddbmm has another kernel for products of fewer than 400
        multiplications a task, and for vectors of one number. And most nonlinearities have
        another routine for what is left over of a tensor behind its last 32 numbers.
        """
        widths = (self.input_size, *self.hidden_sizes, self.output_size)
        has_one_kernel = min(widths) > 1 and all(
            num_rows * inputs * outputs >= _LEAST_EXACT_PRODUCT
            for inputs, outputs in itertools.pairwise(widths)
        )
        return has_one_kernel and self._ends_exactly(num_rows)

    def _ends_exactly(self, num_rows: int) -> bool:
        """Whether so many rows leave no numbers over that would get other bits."""
        return self.nonlinearity_name in _EXACT_TO_THE_END or all(
            num_rows * width % _FLOATS_AT_A_TIME == 0 for width in self.hidden_sizes
        )

    def check_params(self, params: Params) -> None:
        """Compare names and shapes with the policy's own parameters.

        Raises:
            ParameterError: A name is missing or unknown, or a shape is wrong: neither the own
                one nor, for all of them, the own one behind the same leading axis M.
        """
        own = dict(self.named_parameters())
        missing = [name for name in own if name not in params]
        unknown = [name for name in params if name not in own]
        if missing or unknown:
            message = (
                f"params of {type(self).__name__} lack {missing} and have {unknown} in excess; "
                f"their names must be those of named_parameters(): {list(own)}"
            )
            raise ParameterError(message)
        first = next(iter(own))
        stack = params[first].shape[:1] if params[first].ndim > own[first].ndim else torch.Size()
        for name, parameter in own.items():
            if params[name].shape != stack + parameter.shape:
                message = (
                    f"{name} of {type(self).__name__} must have shape {tuple(parameter.shape)}, "
                    f"all with one more leading axis for stacked tasks or none, "
                    f"got {tuple(params[name].shape)}"
                )
                raise ParameterError(message)

    def update_params(
        self,
        loss: Tensor,
        params: Params | None = None,
        step_size: float | Tensor | Mapping[str, float | Tensor] = 0.5,
        first_order: bool = False,
    ) -> OrderedDict[str, Tensor]:
        """Take one gradient step on `loss` and return the parameters after it.

        Source: Finn et al. (2017), eq. 1, https://arxiv.org/abs/1703.03400. The result stays
        differentiable with respect to `params`. With stacked parameters the loss must be the
        sum over tasks, for each task to step by its own gradient.

        Args:
            loss: Scalar that depends on `params`; those that it does not depend on stay.
            params: Where to step from; None: the policy's own.
            step_size: One for all, or one for each name, broadcast to the parameter.
            first_order: Take the gradient as a constant: no derivative flows through it.

        Raises:
            ParameterError: No parameter requires a gradient, or a name has no step size.
        """
        params = OrderedDict(self.named_parameters()) if params is None else params
        moving = [name for name, parameter in params.items() if parameter.requires_grad]
        rates = step_size if isinstance(step_size, Mapping) else dict.fromkeys(moving, step_size)
        if not moving or (without := [name for name in moving if name not in rates]):
            reason = f"{without} have no step size" if moving else "none requires a gradient"
            message = f"update_params cannot step from these params: {reason}"
            raise ParameterError(message)
        gradients = torch.autograd.grad(
            loss,
            [params[name] for name in moving],
            create_graph=not first_order,
            allow_unused=True,
        )
        updated = OrderedDict(params)
        for name, gradient in zip(moving, gradients, strict=True):
            if gradient is not None:
                updated[name] = params[name] - rates[name] * gradient
        return updated

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write class, arguments and parameters into a file for `load_policy`.

        Raises:
            ConfigurationError: The nonlinearity or the class is not one of this package.
        """
        # Here, since that module knows the subclasses.
        from asyncmaml.learning.policy_files import save_policy

        save_policy(self, path)

    def arguments(self) -> dict[str, Any]:
        """What an equal policy is made with, as plain data; the nonlinearity by its name."""
        return self._arguments() | {
            "input_size": self.input_size,
            "hidden_sizes": self.hidden_sizes,
            "nonlinearity": self.nonlinearity_name,
            "observation_ndim": self.observation_ndim,
            "observation_start": self.observation_start,
        }

    @abstractmethod
    def _distribution(self, outputs: Tensor, params: Params) -> Distribution:
        """The distribution whose parameters are the network's outputs."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """The arguments of the subclass alone, as plain data."""

    def _own_params(self) -> dict[str, Tensor]:
        """`dict(named_parameters())` in a tenth of the time; live, as functional_call wants it."""
        modules = cast("dict[str, nn.Module]", self._modules)
        params = dict(self._parameters)
        for weight, bias in self._layer_names:
            own = modules[weight[:-7]]._parameters
            params[weight], params[bias] = own["weight"], own["bias"]
        return cast("dict[str, Tensor]", params)

    def _outputs(self, observations: Tensor, params: Params) -> Tensor:
        """The last layer's outputs: batch axes, then `output_size`."""
        weight = params[self._layer_names[0][0]]
        hidden = self._vectors(observations, weight.dtype)
        if weight.ndim == 2:
            for weight_name, bias_name in self._layer_names[:-1]:
                hidden = F.linear(hidden, params[weight_name], params[bias_name])
                hidden = self.nonlinearity(hidden)
            weight_name, bias_name = self._layer_names[-1]
            return F.linear(hidden, params[weight_name], params[bias_name])
        # Bit for bit the same as one task after the other where `stacks_exactly` says so.
        batch = hidden.shape[:-1]
        hidden = hidden.reshape(batch[0], -1, hidden.shape[-1])
        for index, (weight_name, bias_name) in enumerate(self._layer_names):
            if index:
                hidden = self.nonlinearity(hidden)
            weight, bias = params[weight_name], params[bias_name]
            hidden = torch.baddbmm(bias.unsqueeze(1), hidden, weight.transpose(1, 2))
        return hidden.reshape(*batch, hidden.shape[-1])

    def _vectors(self, observations: Tensor, dtype: torch.dtype) -> Tensor:
        """One vector of `input_size` numbers per observation."""
        if self.observation_ndim == 1:
            return observations if observations.dtype is dtype else observations.to(dtype)
        if self.observation_ndim == 0:
            indices = observations.long() - self.observation_start
            return F.one_hot(indices, self.input_size).to(dtype)
        flat = observations.flatten(-self.observation_ndim)
        return flat.to(dtype) / 255 if flat.dtype is torch.uint8 else flat.to(dtype)


def _named_nonlinearity(nonlinearity: Nonlinearity | str) -> tuple[str | None, Nonlinearity]:
    """The name that it can be saved under, if any, and the function to call."""
    for name, functions in NONLINEARITIES.items():
        if nonlinearity == name or any(nonlinearity is function for function in functions):
            return name, functions[0]
    if isinstance(nonlinearity, str):
        message = f"nonlinearity must be a callable or one of {sorted(NONLINEARITIES)}, got "
        raise ConfigurationError(message + repr(nonlinearity))
    if isinstance(nonlinearity, nn.Module) and any(True for _ in nonlinearity.parameters()):
        message = f"nonlinearity must have no parameters of its own, got {nonlinearity}"
        raise ConfigurationError(message)
    return None, nonlinearity
