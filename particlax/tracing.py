"""What functions compute, read from their traces: on what a result depends, and whether two ways to call a function are one."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import partial_eval
from jaxtyping import PyTree

__all__ = ["computed_alike", "depends", "uses_last"]

NOTES = {"debug_info", "ft_in", "ft_out", "name"}
"""Parameters of operations that tell of their inputs and names, also of inputs that nothing uses."""


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
    if not _same_traces(plain, like, x):
        return False
    try:
        return _same_traces([_with_derivative(one) for one in plain], like, x)
    except Exception:  # not to be differentiated in prediction, say
        return True


def _with_derivative(one: Callable[..., Any]) -> Callable[..., Any]:
    """What is written as a custom derivative is not printed with the function."""

    def both(p: PyTree, *args: Any) -> Any:
        out, pull = jax.vjp(lambda p: one(p, *args), p)
        return out, pull(jax.tree.map(_cotangent, out))

    return both


def _same_traces(functions: Sequence[Callable[..., Any]], like: Any, x: PyTree) -> bool:
    keys = tuple(jax.random.split(jax.random.key(0)))
    forms = []
    for one in functions:
        made = jax.make_jaxpr(one)(*like, x, keys)
        wanted = [True] * len(made.jaxpr.outvars)
        kept, _ = partial_eval.dce_jaxpr(made.jaxpr, wanted, instantiate=True)
        forms.append(_form(kept, made.consts))
    return forms[0] == forms[1]


def _cotangent(out: Any) -> Any:
    real = jnp.issubdtype(out.dtype, jnp.inexact)
    return jnp.ones_like(out) if real else np.zeros(out.shape, jax.dtypes.float0)


def _form(jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
    """What is computed: operations by name, their inputs by where these come from, and numbers by value."""
    known: dict[Any, Any] = {var: ("const", i) for i, var in enumerate(jaxpr.constvars)}
    known |= {var: _number(value) for var, value in zip(jaxpr.constvars, consts, strict=False)}
    known |= {var: ("input", i, str(var.aval)) for i, var in enumerate(jaxpr.invars)}

    def read(atom: Any) -> Any:
        return _number(atom.val) if isinstance(atom, core.Literal) else known[atom]

    operations = []
    for i, eqn in enumerate(jaxpr.eqns):
        options = {name: _option(v) for name, v in eqn.params.items() if name not in NOTES}
        outs = [str(var.aval) for var in eqn.outvars]
        operations.append((eqn.primitive.name, [read(a) for a in eqn.invars], options, outs))
        known |= {var: (i, place) for place, var in enumerate(eqn.outvars)}
    return operations, [read(atom) for atom in jaxpr.outvars]


def _option(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        return _form(value.jaxpr, value.consts)
    if isinstance(value, core.Jaxpr):
        return _form(value)
    if isinstance(value, (tuple, list)):
        return [_option(part) for part in value]
    # Functions are rules of derivatives, which are compared as traces of their own.
    return None if callable(value) else re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _number(value: Any) -> Any:
    if isinstance(value, Tracer):
        return "tracer", id(value)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    value = np.asarray(value)
    return str(value.dtype), value.shape, value.tobytes()
