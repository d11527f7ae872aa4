"""Elementwise functions of pairs as data: traced once on scalars, then evaluated on tiles of any shape.

A fused kernel cannot close over arrays, so what a function closes over becomes an argument. And in a kernel every operation
counts: scalar factors are carried beside the tiles and not multiplied in, which makes of `exp(-r2 / h)` one product and one
power of two, and shows that the kernel and its slope, -2 K / h, are one tile with two factors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["Formula", "Instructions", "Scaled", "evaluate", "function", "trace"]

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that call a function, by the name of the parameter that holds it."""
SAME = {
    *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "stop_gradient"),
    # On a mesh: JAX tells where a number lies that was made outside of the part for one device.
    *("mesh_cast", "pcast", "pvary", "reshard", "sharding_constraint"),
}
"""Primitives that do nothing to a float32 scalar."""
ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "ceil", "clamp", "cos", "div", "eq", "exp", "exp2", "expm1"),
    *("floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt"),
    *("max", "min", "mul", "ne", "neg", "not", "or", "pow", "rsqrt", "select_n", "sign", "sin"),
    *("sqrt", "square", "sub", "tan", "tanh", "xor"),
}
"""Primitives that a kernel knows and that act on every entry alone."""


class Formula(NamedTuple):
    """A function of scalars, and the scalars that it closes over."""

    jaxpr: Any
    consts: Sequence[Array]


class Scaled(NamedTuple):
    """factor * tile, not multiplied out; without a tile the factor alone."""

    factor: Any
    tile: Any = None

    def array(self) -> Any:
        """The product."""
        if self.tile is None:
            return self.factor
        return self.tile if _is(self.factor, 1.0) else self.factor * self.tile

    def settled(self) -> "Scaled":
        """With a factor known now: a product of unknown ones might overflow where that with the tiles does not."""
        known = self.tile is None or isinstance(self.factor, float)
        return self if known else Scaled(1.0, self.array())


def trace(function: Callable[..., Any], count: int) -> Formula | None:
    """`function` of `count` float32 scalars as a formula, or None if a kernel could not evaluate it."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        closed = jax.make_jaxpr(function)(*[scalar] * count)
    except (TypeError, ValueError, IndexError):  # it wants whole arrays
        return None
    scalars = all(jnp.shape(c) == () and jnp.result_type(c) == jnp.float32 for c in closed.consts)
    if not scalars or not _known(closed.jaxpr):
        return None
    return Formula(closed.jaxpr, [jnp.asarray(c) for c in closed.consts])


def _known(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            if getattr(inner, "consts", ()) or not _known(getattr(inner, "jaxpr", inner)):
                return False
        elif name in SAME:
            if any(v.aval.dtype != jnp.float32 for v in (*eqn.invars, *eqn.outvars)):
                return False
        elif name not in ELEMENTWISE:
            return False
    return all(var.aval.shape == () for var in jaxpr.outvars)


class Instructions(NamedTuple):
    """What a kernel has words of its own for."""

    exp2: Callable[[Any], Any] = jnp.exp2
    fma: Callable[[Any, Any, Any], Any] = lambda a, b, c: a * b + c


def evaluate(
    formula: Formula, args: Sequence[Any], how: Instructions = Instructions()
) -> list[Scaled]:
    """The formula's results on tiles of any shapes that go together."""
    return _run(
        formula.jaxpr, [Scaled(c) for c in formula.consts], [Scaled(1.0, a) for a in args], how
    )


def function(formula: Formula) -> Callable[..., Any]:
    """The formula as an elementwise function again: of one result, or a tuple of them."""

    def call(*args: Array) -> Any:
        shape = jnp.broadcast_shapes(*[a.shape for a in args])
        found = [jnp.broadcast_to(out.array(), shape) for out in evaluate(formula, args)]
        return found[0] if len(found) == 1 else tuple(found)

    return call


def _run(
    jaxpr: Any, consts: Sequence[Scaled], args: Sequence[Scaled], how: Instructions
) -> list[Scaled]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda var: Scaled(_plain(var.val)) if hasattr(var, "val") else known[var]
    for eqn in jaxpr.eqns:
        values = [read(var) for var in eqn.invars]
        name = eqn.primitive.name
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            results = _run(getattr(inner, "jaxpr", inner), (), values, how)
        else:
            results = [_apply(eqn, name, values, how)]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _apply(eqn: Any, name: str, values: list[Scaled], how: Instructions) -> Scaled:
    first = values[0]
    if name in SAME:
        return first
    if name in ("exp", "exp2") and first.tile is not None:
        rate = first.factor * math.log2(math.e) if name == "exp" else first.factor
        return Scaled(1.0, how.exp2(Scaled(rate, first.tile).array()))
    carried = _carried(name, first, values[-1])
    if carried is not None:
        return carried
    if name in ("add", "add_any", "sub"):
        return _sum(
            first, Scaled(-values[1].factor, values[1].tile) if name == "sub" else values[1], how
        )
    return _general(eqn, values)


def _sum(a: Scaled, b: Scaled, how: Instructions) -> Scaled:
    """a + b, at once with the product of a factor and its tile if there is one."""
    if a.tile is None or (b.tile is not None and _is(a.factor, 1.0)):
        a, b = b, a
    if a.tile is None:
        return Scaled(a.factor + b.factor)
    if _is(a.factor, 1.0):
        return Scaled(1.0, a.tile + b.array())
    return Scaled(1.0, how.fma(a.tile, a.factor, b.array()))


def _carried(name: str, a: Scaled, b: Scaled) -> Scaled | None:
    """Operations that leave factors outside."""
    tile = b.tile if a.tile is None else a.tile
    if name == "neg":
        return Scaled(-a.factor, a.tile)
    if name == "mul" and (a.tile is None or b.tile is None):
        return Scaled(_times(a.factor, b.factor), tile)
    if name == "mul":
        a, b = a.settled(), b.settled()
        return Scaled(_times(a.factor, b.factor), a.tile * b.tile)
    if name == "div" and b.tile is None:
        return Scaled(a.factor / b.factor, tile)
    if name in ("add", "add_any", "sub") and a.tile is b.tile is not None:
        return Scaled(a.factor - b.factor if name == "sub" else a.factor + b.factor, tile)
    return None


def _general(eqn: Any, values: list[Scaled]) -> Scaled:
    arrays = [
        jnp.asarray(v.array(), var.aval.dtype) for v, var in zip(values, eqn.invars, strict=True)
    ]
    shape = jnp.broadcast_shapes(*[a.shape for a in arrays])
    result = eqn.primitive.bind(*[jnp.broadcast_to(a, shape) for a in arrays], **eqn.params)
    return Scaled(result) if shape == () else Scaled(1.0, result)


def _plain(value: Any) -> Any:
    """A literal: floats as such, so that factors are known while tracing."""
    return float(value) if jnp.issubdtype(jnp.result_type(value), jnp.floating) else value


def _is(factor: Any, number: float) -> bool:
    return isinstance(factor, float) and factor == number


def _times(a: Any, b: Any) -> Any:
    return b if _is(a, 1.0) else a if _is(b, 1.0) else a * b
