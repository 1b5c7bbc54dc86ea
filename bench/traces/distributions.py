"""Distributions as functions of a standard normal variable.

So the samples of one prompt can share a part of their variance, whatever the distribution is: the
normal variables are correlated, and each is carried to the quantile that it stands at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Z90 = 1.2815515655446004  # standard normal quantiles
Z99 = 2.3263478740408408


class Distribution(Protocol):
    def at(self, normals: Floats) -> Floats:
        """The quantiles that these standard normal variables stand at."""


@dataclass(frozen=True, slots=True)
class Normal:
    mean: float
    sigma: float

    def at(self, normals: Floats) -> Floats:
        return self.mean + self.sigma * normals


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(N(ln median, sigma²)) + shift."""

    median: float
    sigma: float
    shift: float = 0.0

    def at(self, normals: Floats) -> Floats:
        return self.shift + self.median * np.exp(self.sigma * normals)

    @classmethod
    def of(cls, median: float, p90: float = 0.0, p99: float = 0.0) -> Lognormal:
        """The one with this median and this 90th or 99th percentile."""
        sigma = math.log(p90 / median) / Z90 if p90 else math.log(p99 / median) / Z99
        return cls(median, sigma)


@dataclass(frozen=True, slots=True)
class Gamma:
    """shift + scale × the standard gamma distribution."""

    shape: float
    scale: float
    shift: float = 0.0

    def at(self, normals: Floats) -> Floats:
        return self.shift + self.scale * gamma_quantile(self.shape, uniform(normals))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Straight lines between given quantiles, of the values or of their logarithms."""

    points: tuple[tuple[float, float], ...]  # (share, value), from 0 to 1
    logarithmic: bool = False

    def at(self, normals: Floats) -> Floats:
        shares, values = np.array(self.points).T
        values = np.log(values) if self.logarithmic else values
        found: Floats = np.interp(uniform(normals), shares, values)
        return np.exp(found) if self.logarithmic else found


@dataclass(frozen=True, slots=True)
class Tokens:
    """Whole numbers from a distribution, kept between 1 and `cap`."""

    shape: Distribution
    cap: int

    def at(self, normals: Floats) -> NDArray[np.int64]:
        return np.clip(np.rint(self.shape.at(normals)), 1, self.cap).astype(np.int64)


def uniform(normals: Floats) -> Floats:
    return np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in normals.flat]).reshape(
        normals.shape
    )


@cache
def _gamma_table(shape: float) -> tuple[Floats, Floats]:
    grid = np.linspace(0, shape + 40 * math.sqrt(shape), 200_001)
    density = np.zeros_like(grid)
    density[1:] = np.exp((shape - 1) * np.log(grid[1:]) - grid[1:] - math.lgamma(shape))
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return cumulative / cumulative[-1], grid


def gamma_quantile(shape: float, share: Floats) -> Floats:
    """Quantiles of the standard gamma distribution, from a table of its integral."""
    cumulative, grid = _gamma_table(shape)
    return np.interp(share, cumulative, grid)
