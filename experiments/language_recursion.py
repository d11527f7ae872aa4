"""The recursion of an LSTM over time for many networks at once, and its gradient.

Its gradient is written by hand: the recurrent weights' part is one product over all time steps, gates are written over the inputs and
their gradients over the gates.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def product(a: Array, b: Array, kind: Any, out: Any = jnp.float32) -> Array:
    """a @ b with factors rounded to `kind`, summed in float32."""
    return jnp.matmul(a.astype(kind), b.astype(kind), preferred_element_type=jnp.dtype(out))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recur(unroll: int, inputs: Array, recurrent: Array, begin: Array) -> Array:
    """The states [L, n, H] of an LSTM; `inputs` [L, n, 4H] to gates i, f, g, o; `begin` [L, n] is true where the state is reset."""
    return _recur(unroll, inputs, recurrent, begin)[0]


def _recur(unroll: int, inputs: Array, recurrent: Array, begin: Array) -> tuple[Array, Any]:
    keep = ~begin.at[0].set(True)[..., None]  # nothing comes before the first
    h, c, gates = _forward(unroll)(inputs, recurrent.astype(inputs.dtype), keep)
    return h, (h, c, gates, recurrent, keep)


def _recur_back(unroll: int, kept: Any, d_out: Array) -> tuple[Array, Array, None]:
    h, c, gates, recurrent, keep = kept
    d_z = _backward(unroll)(d_out, c, gates, recurrent.astype(h.dtype), keep)
    flat = lambda a: a.reshape(-1, a.shape[-1])
    before = jnp.where(keep, jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]]), 0)
    return d_z, product(flat(before).T, flat(d_z), h.dtype), None


recur.defvjp(_recur, _recur_back)


def together(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop over time for networks side by side, whose last argument they share, as a function of one network that vmap makes it of.

    vmap by itself would lay out whole sequences anew, or scatter each step into them.
    """
    of_one = jax.custom_batching.custom_vmap(
        lambda *a: jax.tree.map(lambda out: out[0], loop(*(each[None] for each in a[:-1]), a[-1]))
    )

    @of_one.def_vmap
    def _(size: int, batched: Any, *a: Array) -> Any:
        assert not batched[-1]
        spread = lambda each, has: each if has else jnp.broadcast_to(each, (size, *each.shape))
        found = loop(*map(spread, a[:-1], batched[:-1]), a[-1])
        return found, jax.tree.map(lambda _: True, found)

    return of_one


def _at(a: Array, place: Array, axis: int = 1) -> Array:
    return lax.dynamic_index_in_dim(a, place, axis, keepdims=False)


def _put(a: Array, value: Array, place: Array) -> Array:
    return lax.dynamic_update_index_in_dim(a, value.astype(a.dtype), place, 1)


@functools.lru_cache
def _forward(unroll: int) -> Callable[..., Any]:
    """States and cells [L, n, H] and gates [L, n, 4H] from inputs, recurrent weights, and where the state of before is kept."""

    @together
    def forward(inputs: Array, weights: Array, keep: Array) -> tuple[Array, Array, Array]:
        kind, hidden = inputs.dtype, weights.shape[1]
        # Gates are sigmoids but for the third, a tanh: 2 sigmoid(2 z) - 1. So they are one operation on all of them.
        scale = jnp.repeat(jnp.array([1.0, 1.0, 2.0, 1.0]), hidden)
        # Reset at the end of a step: at its start the reset would be part of the product, which is slower so.
        keep_next = jnp.concatenate([keep[1:], keep[:1]])

        def step(now: Array, carry: Any) -> Any:
            h, c, hs, cs, gates = carry
            z = _at(gates, now).astype(jnp.float32) + product(h, weights, kind)
            gate = scale * jax.nn.sigmoid(scale * z) - (scale - 1)
            i, f, g, o = jnp.split(gate, 4, -1)
            c = f * c + i * g
            h = (o * jnp.tanh(c)).astype(kind)
            kept = _at(keep_next, now, 0)
            seen = _put(hs, h, now), _put(cs, c, now), _put(gates, gate, now)
            return jnp.where(kept, h, 0), jnp.where(kept, c, 0), *seen

        num, length, rows, _ = inputs.shape
        first = [jnp.zeros((num, rows, hidden), dtype) for dtype in (kind, jnp.float32)]
        some = [lax.empty((num, length, rows, hidden), dtype) for dtype in (kind, jnp.float32)]
        # Gates are written over the inputs.
        return lax.fori_loop(0, length, step, (*first, *some, inputs), unroll=unroll)[2:]

    return forward


@functools.lru_cache
def _backward(unroll: int) -> Callable[..., Any]:
    """The gradient of the inputs from that of the states."""

    @together
    def backward(d_out: Array, c: Array, gates: Array, weights: Array, keep: Array) -> Array:
        kind, last, turned = gates.dtype, gates.shape[1] - 1, jnp.swapaxes(weights, 1, 2)

        def step(number: Array, carry: Any) -> Any:
            d_h, d_c, d_z = carry
            now = last - number
            i, f, g, o = jnp.split(_at(d_z, now).astype(jnp.float32), 4, -1)
            d_h = d_h + _at(d_out, now).astype(jnp.float32)
            tanh, fresh = jnp.tanh(_at(c, now)), _at(keep, now, 0)
            before = jnp.where(fresh, _at(c, jnp.maximum(now - 1, 0)), 0)
            d_c = d_c + d_h * o * (1 - tanh**2)
            parts = [
                d_c * g * i * (1 - i), d_c * before * f * (1 - f),
                d_c * i * (1 - g**2), d_h * tanh * o * (1 - o),
            ]  # fmt: skip
            d_gate = jnp.concatenate(parts, -1).astype(kind)
            d_h = jnp.where(fresh, product(d_gate, turned, kind), 0)
            return d_h, jnp.where(fresh, d_c * f, 0), _put(d_z, d_gate, now)

        zero = jnp.zeros((len(c), *c.shape[2:]))
        # Gradients are written over the gates.
        return lax.fori_loop(0, last + 1, step, (zero, zero, gates), unroll=unroll)[2]

    return backward
