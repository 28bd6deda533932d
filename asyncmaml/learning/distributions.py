"""Distributions taken apart into their numbers and put together again, and their divergence."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    Normal,
    kl_divergence,
)

from asyncmaml.errors import PolicyError
from asyncmaml.learning.phases import masked_mean


def numbers_of(distribution: Distribution) -> tuple[Tensor, ...]:
    """Return the tensors that the distribution is made of.

    Raises:
        PolicyError: It is of a kind that learners do not know.
    """
    match distribution:
        case Independent(base_dist=base):
            return numbers_of(base)
        case Normal(loc=loc, scale=scale):
            return loc, scale
        case Categorical(logits=logits) | Bernoulli(logits=logits):
            return (logits,)
    message = (
        f"a learner knows Normal, Categorical, Bernoulli and Independent of these, and the policy "
        f"returned {distribution}; return one of them"
    )
    raise PolicyError(message)


def with_numbers(distribution: Distribution, numbers: Sequence[Tensor]) -> Distribution:
    """Return one of the same kind, made of other numbers."""
    match distribution:
        case Independent(base_dist=base, reinterpreted_batch_ndims=ndims):
            return Independent(with_numbers(base, numbers), ndims, validate_args=False)
        case Normal():
            return Normal(numbers[0], numbers[1], validate_args=False)
        case Categorical():
            return Categorical(logits=numbers[0], validate_args=False)
    return Bernoulli(logits=numbers[0], validate_args=False)


def detached(distribution: Distribution) -> Distribution:
    """Return the same distribution as a constant."""
    return with_numbers(distribution, [number.detach() for number in numbers_of(distribution)])


def mean_kl(old: Distribution, new: Distribution, mask: Tensor) -> Tensor:
    """Return KL(old || new), the mean over the steps taken of each task: `()` or `(M,)`.

    In TRPO's direction (Schulman et al. 2015, https://arxiv.org/abs/1502.05477, eq. 12).
    """
    return masked_mean(kl_divergence(old, new), mask)
