"""Numbers that may be schedules: their checks and their value at a step."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from particlax.errors import OptionError

Scheduled: TypeAlias = float | Array | Callable[[Any], Any]
"""A number, or an optax schedule: a function from the step number to a number."""


def positive(name: str, value: Any, *, zero: bool = True) -> None:
    """Refuse a number (or the first value of a schedule) that is negative, NaN or infinite."""
    first = value(0) if callable(value) else value
    if isinstance(first, Tracer):
        return
    try:
        number = float(np.asarray(first))
    except (TypeError, ValueError):
        raise OptionError(
            f"{name} is {value!r}; expected a number or an optax schedule (step -> number)"
        ) from None
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        source = f"{number} at step 0 of its schedule" if callable(value) else f"{number}"
        wanted = "a finite number >= 0" if zero else "a finite number > 0"
        raise OptionError(f"{name} is {source}; expected {wanted}")


def at(value: Scheduled, step: Array, dtype: Any = None) -> Array:
    """The value of a number or schedule at `step`."""
    return jnp.asarray(value(step) if callable(value) else value, dtype)
