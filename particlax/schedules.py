"""Step-size schedules of the SG-MCMC literature; every optax schedule works as well."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from particlax.checks import positive
from particlax.errors import OptionError

__all__ = ["cyclical", "polynomial"]

Schedule = Callable[[Any], Array]


def polynomial(a: float, b: float = 1.0, gamma: float = 0.55) -> Schedule:
    """a (b + t)^-gamma: the decay of Welling & Teh (2011); its sum diverges for gamma <= 1.

    The squares' sum is finite for gamma > 1/2, so SGLD then converges without a rejection step.

    >>> round(float(polynomial(0.1, b=1.0, gamma=0.5)(3)), 6)
    0.05
    """
    positive("a", a)
    positive("b", b, zero=False)
    if not 0.5 <= gamma <= 1:
        raise OptionError(f"gamma is {gamma}; expected a number in [0.5, 1]")

    def schedule(step: Any) -> Array:
        return a * (b + jnp.asarray(step, jnp.result_type(float))) ** -gamma

    return schedule


def cyclical(a: float, period: int) -> Schedule:
    """a/2 (cos(pi (t mod period) / period) + 1): the cyclical steps of Zhang et al. (2020).

    >>> float(cyclical(0.2, period=10)(0)), round(float(cyclical(0.2, period=10)(5)), 6)
    (0.20000000298023224, 0.1)
    """
    positive("a", a)
    if period < 1:
        raise OptionError(f"period is {period}; expected at least 1 step")

    def schedule(step: Any) -> Array:
        phase = jnp.asarray(step % period, jnp.result_type(float)) / period
        return a / 2 * (jnp.cos(jnp.pi * phase) + 1)

    return schedule
