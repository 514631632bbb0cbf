"""When requests are sent. Pure arithmetic: knows no clock."""

import math
from typing import cast

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests are sent.

    The gaps are drawn from a gamma distribution of shape `burstiness` and mean 1/rate: exponential (a Poisson process)
    at 1, burstier below, more even above, constant at infinity. The times are then scaled so that the last request
    is sent at count/rate exactly: two seeds offer the same load. An infinite rate sends all at 0.

    The draws are those that numpy's global generator makes after `numpy.random.seed(seed)`, so that the same seed
    gives the arrivals that `vllm bench serve` gives.
    """
    if math.isinf(rate) or count == 0:
        return [0.0] * count
    if math.isinf(burstiness):
        return [(number + 1) / rate for number in range(count)]
    gaps = np.random.RandomState(seed).gamma(shape=burstiness, scale=1 / (rate * burstiness), size=count)
    times = np.cumsum(gaps)
    return cast(list[float], (times * (count / rate / times[-1])).tolist())
