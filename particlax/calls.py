"""Calls that XLA for CPUs keeps: nothing in one is fused with what is around it, and it waits for all that it is given.

XLA takes operations into the loops of others as it sees fit, and orders them by what they read. Where that costs a copy of a cloud,
a call says what is wanted. Where JAX's default backend is no CPU, and for a version of XLA that does not know the sign, it is the function itself.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

try:
    from jax.experimental.xla_metadata import set_xla_metadata
except ImportError:  # it is experimental
    set_xla_metadata = None

__all__ = ["after", "kept"]


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as such a call."""
    traced = jax.jit(function)

    def called(*args: Any) -> Any:
        if jax.default_backend() != "cpu" or set_xla_metadata is None:
            return function(*args)
        with set_xla_metadata(inlineable="false"):
            return traced(*args)

    return called


def after(first: PyTree, value: PyTree) -> PyTree:
    """`value` as it is, on a CPU once `first` is known."""
    return _second(first, value) if jax.default_backend() == "cpu" else value


_second = kept(lambda first, value: lax.optimization_barrier((first, value))[1])
