"""Base of all parts, and numbers that may be schedules: their checks and their value at a step."""

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from particlax.errors import DataError, OptionError, check_options, told

Scheduled: TypeAlias = float | int | Array | Callable[[Any], Any]
"""A number, or an optax schedule: a function from the step number to a number."""


class Part(eqx.Module):
    """A frozen dataclass and pytree whose constructor says which options it has."""

    def __new__(cls, *args: Any, **kwargs: Any):
        """Refuse unknown options before the fields are set."""
        parameters = [p for p in inspect.signature(cls.__init__).parameters.values()][1:]
        if all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            places = len([p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD])
            check_options(cls.__name__, [p.name for p in parameters], places, len(args), kwargs)
        return super().__new__(cls)


def number(value: Any) -> Any:
    """A concrete scalar array as a float, so that flows stay hashable; anything else as it is."""
    array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if array and not isinstance(value, Tracer) and np.ndim(value) == 0:
        return float(value)
    return value


SCHEDULE = "an optax schedule (step -> number)"


def positive(
    name: str, value: Any, *, zero: bool = True, schedule: bool = True, also: str = ""
) -> None:
    """Refuse a number (or the first value of a schedule) that is negative, NaN or infinite; `also` is what else it might be."""
    if callable(value) and not schedule:
        raise OptionError(
            f"{name} is {told(value)}; expected a number: it takes no schedule or other function"
        )
    first = value(0) if callable(value) else value
    if isinstance(first, Tracer):
        return
    try:
        if isinstance(first, (str, bytes, bool)):
            raise TypeError
        size = float(np.asarray(first))
    except (TypeError, ValueError):
        other = also or SCHEDULE * schedule
        raise OptionError(
            f"{name} is {told(value)}; expected a number{' or ' * bool(other)}{other}"
        ) from None
    if not math.isfinite(size) or size < 0 or (size == 0 and not zero):
        source = f"{size} at step 0 of its schedule" if callable(value) else f"{size}"
        wanted = "a finite number >= 0" if zero else "a finite number > 0"
        raise OptionError(f"{name} is {source}; expected {wanted}")


TRACED = (
    "{what} asks whether something holds of the step number, which is not known while the step is compiled; choose with jnp.where(step < "
    "100, 0.1, 0.01) in place of `if`, or with an optax schedule: optax.piecewise_constant_schedule(0.1, {{100: 0.1}})"
)


def at(value: Scheduled, step: Array, dtype: Any = None) -> Array:
    """The value of a number or schedule at `step`; NaN, which stops a run, where it is negative."""
    if not callable(value):
        return jnp.asarray(value, dtype)
    try:
        now = jnp.asarray(value(step), dtype)
    except jax.errors.ConcretizationTypeError as error:
        raise OptionError(TRACED.format(what=f"the schedule {told(value)}")) from error
    return jnp.where(now >= 0, now, jnp.nan)


def whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise OptionError(f"{name} is {told(value)}; expected a whole number >= {least}")


def refuse_not_finite(name: str, tree: PyTree, error: type[ValueError] = DataError) -> None:
    """Refuse arrays with NaN or infinity, naming the first such row (skipped under tracing)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, Tracer) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            continue
        numbers = jnp if isinstance(leaf, jax.Array) else np
        if not bool(numbers.all(numbers.isfinite(leaf))):
            place = np.argwhere(~np.isfinite(np.asarray(leaf, np.float64)))[0]
            row = f"row {place[0]} of " if place.size else ""
            raise error(
                f"{row}{name}{jax.tree_util.keystr(path)} is not finite; expected finite numbers. Leave it out, or "
                "fill what is missing"
            )


def refuse_traced(what: str, tree: PyTree, instead: str) -> None:
    """Refuse what `jax.jit`, `vmap` or another transformation is looking at, for what works on the host."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise OptionError(
            f"{what} works on the host, but what it got came from within jax.jit or another transformation; expected arrays: {instead}"
        )


def as_key(key: Any) -> Array:
    """One JAX key, new or old style, as a typed key."""
    if isinstance(key, (jax.Array, np.ndarray)):
        if key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return jnp.asarray(key)
        if key.shape == (2,) and key.dtype == jnp.uint32:  # jax.random.PRNGKey
            return jax.random.wrap_key_data(jnp.asarray(key))
    raise OptionError(f"key is {told(key)}; expected one JAX key, for instance jax.random.key(0)")


def as_generator(key: Array) -> np.random.Generator:
    """A NumPy generator that is a function of a JAX key: for draws not worth compiling."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
