"""What functions compute, read from their traces: on what a result depends, and whether two ways to call a function are one."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import partial_eval
from jaxtyping import PyTree

__all__ = ["computed_alike", "depends", "uses_last"]

INNER = (core.Jaxpr, core.ClosedJaxpr)


def depends(function: Callable[..., Any]) -> bool:
    """Whether what function(key) returns depends on the key.

    >>> depends(lambda key: jax.random.normal(key)), depends(lambda key: 0 * jnp.ones(3))
    (True, False)
    """
    return uses_last(jax.make_jaxpr(function)(jax.random.key(0)), 1)


def uses_last(made: core.ClosedJaxpr, num: int) -> bool:
    """Whether any of the last `num` inputs is used for what comes out.

    >>> uses_last(jax.make_jaxpr(lambda x, y: x + 0 * jnp.ones(2))(1.0, 2.0), 1)
    False
    """
    wanted = [True] * len(made.jaxpr.outvars)
    return any(partial_eval.dce_jaxpr(made.jaxpr, wanted)[1][-num:])


def computed_alike(run: Callable[..., Any], like: tuple[PyTree, PyTree], x: PyTree) -> bool:
    """Whether run(params, carried, x, keys) computes its outputs and their derivative with keys as without, up to random numbers that nothing uses.

    >>> run = lambda p, c, x, keys: ((p * x if keys is None else p * x * jnp.array([2.0])), c)
    >>> computed_alike(run, (jnp.ones(1), ()), jnp.ones(1))
    False
    """
    plain = [
        lambda p, c, x, keys: run(p, c, x, None)[0],
        lambda p, c, x, keys: run(p, c, x, keys)[0],
    ]
    try:
        return _same_traces([_with_derivative(one) for one in plain], like, x)
    except Exception:  # not to be differentiated in prediction, say
        return _same_traces(plain, like, x)


def _with_derivative(one: Callable[..., Any]) -> Callable[..., Any]:
    """What is written as a custom derivative is not printed with the function."""

    def both(p: PyTree, *args: Any) -> Any:
        out, pull = jax.vjp(lambda p: one(p, *args), p)
        return out, pull(jax.tree.map(_cotangent, out))

    return both


def _same_traces(functions: Sequence[Callable[..., Any]], like: Any, x: PyTree) -> bool:
    told, keys = [], tuple(jax.random.split(jax.random.key(0)))
    for one in functions:
        made = jax.make_jaxpr(one)(*like, x, keys)
        wanted = [True] * len(made.jaxpr.outvars)
        kept, _ = partial_eval.dce_jaxpr(made.jaxpr, wanted, instantiate=True)
        printed = re.sub(r" at 0x[0-9a-f]+", "", str(kept))
        told.append((printed, [*_constants(kept, made.consts)]))
    (without, fixed), (given, other) = told
    return without == given and len(fixed) == len(other) and all(map(_same, fixed, other))


def _cotangent(out: Any) -> Any:
    real = jnp.issubdtype(out.dtype, jnp.inexact)
    return jnp.ones_like(out) if real else np.zeros(out.shape, jax.dtypes.float0)


def _constants(jaxpr: Any, values: Sequence[Any] = ()) -> Iterator[Any]:
    """The arrays that it uses: they are not printed with it."""
    inputs = [var for equation in jaxpr.eqns for var in equation.invars]
    used = {id(var) for var in [*inputs, *jaxpr.outvars]}
    of = zip(jaxpr.constvars, values, strict=False)
    yield from (value for var, value in of if id(var) in used)
    yield from (var.val for var in [*inputs, *jaxpr.outvars] if isinstance(var, core.Literal))
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(equation.params, is_leaf=lambda part: isinstance(part, INNER))
        for part in inner:
            if isinstance(part, INNER):
                yield from _constants(getattr(part, "jaxpr", part), getattr(part, "consts", ()))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return a is b
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
