"""Mean, spread and confidence interval of returns over tasks or runs; plain Python."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """What is known of a mean from some independent values.

    Attributes:
        mean: Of the values.
        sd: Standard deviation of the sample (divided by n - 1); NaN for one value alone.
        low: Lower end of the 95 % interval of the mean, by Student's t; NaN for one value alone.
        high: Its upper end.
    """

    mean: float
    sd: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of what the values were drawn from.

    The interval assumes that the values are independent and their mean about normal.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan, math.nan)
    sd = statistics.stdev(values)
    reach = student_quantile(len(values) - 1) * sd / math.sqrt(len(values))
    return Estimate(mean, sd, mean - reach, mean + reach)


def student_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t with so many degrees of freedom.

    Closed form for 1 and 2; else Abramowitz and Stegun (1964), 26.7.5, within 0.2 %.
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = _NORMAL_QUANTILE
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
