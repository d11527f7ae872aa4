"""Programs that repeat bit for bit, in any process of one machine. A CPU's always do; a GPU's do when XLA is told so.

XLA for a GPU times several programs for one product and takes the fastest, so another process may come to another one, with other
roundings. To choose without timing costs next to nothing. And where many threads add to one place, as the gradient of a lookup in a
table does, they come in any order. To fix the order costs much, so it is done for steps that have such sums alone. What cannot be seen
in a step, or is undefined, is left alone: sums inside kernels of one's own, and setting one place twice.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import PyTree

FAST, ALIKE, ORDERED = "fast", "alike", "ordered"
OPTIONS: dict[str, dict[str, Any]] = {
    FAST: {},
    ALIKE: {"xla_gpu_autotune_level": 0},
    ORDERED: {"xla_gpu_deterministic_ops": True},  # implies the other
}
"""What XLA is told."""
SUMS = ("scatter-add", "scatter-sub", "scatter-mul")
UNORDERED = ("select_and_scatter_add", "conv_general_dilated")
"""Of convolutions' gradients some programs have no order."""


def compiled(function: Callable[..., Any], donate: Any) -> dict[str, Any]:
    """`function` as each kind of program; compiled when called."""
    jit = lambda options: eqx.filter_jit(function, donate=donate, compiler_options=options or None)  # pyright: ignore  # fmt: skip
    return {name: jit(options) for name, options in OPTIONS.items()}


def chooses(tree: PyTree) -> bool:
    """Whether XLA, unless told otherwise, may compile another program for these arrays in another process."""
    devices = (leaf.devices() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return any(device.platform == "gpu" for some in devices for device in some)


def repeatable(function: Callable[..., Any], *args: Any) -> str:
    """The kind of program of function(*args) that repeats: ordered if it has sums without an order.

    >>> repeatable(jnp.sum, jnp.ones(3))
    'alike'
    >>> repeatable(jax.grad(lambda table: jnp.sum(table[jnp.array([0, 0, 1])])), jnp.ones(3))
    'ordered'
    """
    made, _, _ = eqx.filter_make_jaxpr(function)(*args)
    return ORDERED if any(map(_unordered, _equations(made.jaxpr))) else ALIKE


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        inner = lambda value: isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
        for value in jax.tree.leaves(equation.params, is_leaf=inner):
            if inner(value):
                yield from _equations(getattr(value, "jaxpr", value))


def _unordered(equation: Any) -> bool:
    name = equation.primitive.name
    if name not in SUMS:
        return name in UNORDERED
    places, dtype = equation.invars[1].aval, equation.outvars[0].aval.dtype
    several = any(size != 1 for size in places.shape[:-1])  # an index is a row of the last axis
    return several and not equation.params["unique_indices"] and jnp.issubdtype(dtype, jnp.inexact)
