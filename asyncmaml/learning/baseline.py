"""`LinearFeatureBaseline`: the value of an observation and its step, by ridge regression.

Source: Duan et al. (2016), https://arxiv.org/abs/1604.06778, appendix A, and its code, rllab's
`LinearFeatureBaseline`. The fit belongs to the episodes it was made on: nothing is kept, so no
task sees what another one left behind.
"""

import torch
from torch import Tensor

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import LearningError
from asyncmaml.option_kinds import Real

LARGEST_OBSERVATION = 10.0  # rllab clips here before it squares
STEPS_PER_UNIT = 100.0  # of the time features; rllab
CHOLESKY_TRIES = 5  # each with ten times the regularization of the one before; rllab
MOST_NUMBERS = 256  # of one observation: pixels, or kinds of an integer one


class LinearFeatureBaseline:
    """Predicts the discounted return of a step from features of its observation and time.

    The features of an observation o at step t are o, clipped to +-10, its square, t / 100, its
    square and cube, and 1. An integer observation (a `Discrete` space) becomes one-hot over the
    kinds that these episodes saw, if they saw at most 256; beyond that it stays one number, clipped
    as any. Numbers of uint8 are scaled to [0, 1]; observations of more than 256 numbers, images
    above all, are averaged over neighbours to 256.

    Args:
        regularization: Weight of the coefficients' squares beside the squared errors.

    Raises:
        ConfigurationError: The weight is not a positive number.
    """

    def __init__(self, regularization: float = 1e-5) -> None:
        kind = Real(0, above=True)
        self.regularization: float = kind.check("regularization", regularization)

    def values(self, episodes: BatchEpisodes) -> Tensor:
        """Fit on the returns of `episodes` and return the predictions, `(T, B)`, float64.

        Raises:
            LearningError: A return or an observation is not finite.
        """
        return self.values_and_last(episodes)[0]

    def values_and_last(self, episodes: BatchEpisodes) -> tuple[Tensor, Tensor]:
        """Return the values `(T, B)`, and those of `last_observations`, `(B,)`, by the same fit."""
        observations, last = episodes.observations.cpu(), episodes.last_observations.cpu()
        lengths = episodes.lengths.cpu()
        numbers = _as_numbers(torch.cat([observations, last.unsqueeze(0)]))
        steps = torch.arange(len(observations), dtype=torch.float64).unsqueeze(1)
        features = _features(numbers[:-1], steps.expand(observations.shape[:2]))
        taken = episodes.mask.cpu().bool()
        coefficients = self.fit(features[taken], episodes.returns.cpu()[taken])
        last_features = _features(numbers[-1], lengths.to(torch.float64))
        values = torch.where(taken, features @ coefficients, 0.0)
        return values, last_features @ coefficients

    def fit(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the coefficients `(F,)` of features `(N, F)` nearest to targets `(N,)`.

        Normal equations in float64, by Cholesky's method; if they are singular even so, with ten
        times the regularization each time, five tries in all, and at last by singular values of
        the original ones.

        Raises:
            LearningError: A number is not finite.
        """
        features, targets = features.double(), targets.double()
        if not (features.isfinite().all() and targets.isfinite().all()):
            what = "returns" if features.isfinite().all() else "observations"
            message = (
                f"the baseline was given {what} that are not finite; look for the NaN or infinity "
                "in the environment, or leave these episodes out"
            )
            raise LearningError(message)
        gram, moments = features.mT @ features, features.mT @ targets
        identity = torch.eye(len(gram), dtype=torch.float64)
        regularization = self.regularization
        for _ in range(CHOLESKY_TRIES):
            factor, failed = torch.linalg.cholesky_ex(gram + regularization * identity)
            if not failed:
                coefficients = torch.cholesky_solve(moments.unsqueeze(1), factor).squeeze(1)
                if coefficients.isfinite().all():
                    return coefficients
            regularization *= 10
        rows = torch.cat([features, self.regularization**0.5 * identity])
        padded = torch.cat([targets, targets.new_zeros(len(identity))])
        solution: Tensor = torch.linalg.lstsq(rows, padded.unsqueeze(1), driver="gelsd").solution
        return solution.squeeze(1)


def _features(numbers: Tensor, steps: Tensor) -> Tensor:
    """Numbers of the observations `(..., O)` and their steps `(...)` as features `(..., F)`."""
    clipped = numbers.clamp(-LARGEST_OBSERVATION, LARGEST_OBSERVATION)
    time = steps.unsqueeze(-1) / STEPS_PER_UNIT
    ones = torch.ones_like(time)
    return torch.cat([clipped, clipped**2, time, time**2, time**3, ones], dim=-1)


def _as_numbers(observations: Tensor) -> Tensor:
    """Observations `(T, B, *O)` as float64 vectors `(T, B, O)`."""
    if observations.ndim == 2 and not observations.dtype.is_floating_point:
        kinds, index = torch.unique(observations, return_inverse=True)
        if len(kinds) <= MOST_NUMBERS:
            return torch.nn.functional.one_hot(index, len(kinds)).double()
    numbers = observations.reshape(*observations.shape[:2], -1).double()
    if observations.dtype is torch.uint8:
        numbers = numbers / 255
    if numbers.shape[-1] > MOST_NUMBERS:
        numbers = torch.nn.functional.adaptive_avg_pool1d(numbers, MOST_NUMBERS)
    return numbers
