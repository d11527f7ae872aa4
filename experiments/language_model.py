"""An LSTM language model for many networks at once: its likelihood with dropout, its gradient by hand, its perplexity.

Rows hold several sequences side by side; where one begins, `start` resets the state. Parameters and sums are float32; the factors of
matrix products have the type `kind`: bfloat16 on a GPU. The two gradients written by hand keep what automatic differentiation would spend
memory and time on: the logits are kept once, in `kind`, and the recurrent weights' gradient is one product over all time steps.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.language_text import PAD, Rows
from particlax.networks import GaussianPrior
from particlax.target import Target

Params = dict[str, Array]
ROWS = 8
"""Matrices have a multiple of so many rows, which is what products in bfloat16 are fast for."""
ALIGN = 128
"""The output table has a multiple of this many columns, which tensor cores want; those beyond the vocabulary have probability 0."""


WIDTH = 0.1
"""Of the uniform embeddings."""


class Shape(NamedTuple):
    """Sizes of the network, and how it is computed."""

    words: int
    embedding: int = 300
    hidden: int = 600
    kind: str = "bfloat16"
    unroll: int = 1
    chunk: int = 0
    """Words whose logits are in memory at a time; 0 for all of a batch."""

    @property
    def columns(self) -> int:
        """Of the output table."""
        return -(-self.words // ALIGN) * ALIGN


def start(shape: Shape, key: Array) -> Params:
    """Glorot's uniform weights, embeddings in [-0.1, 0.1], biases 0 but 1 for the forget gate."""
    embed, hidden = shape.embedding, shape.hidden
    keys = jax.random.split(key, 4)
    uniform = lambda key, size, most: jax.random.uniform(key, size, minval=-most, maxval=most)
    cell, out = np.sqrt(6 / (embed + 5 * hidden)), np.sqrt(6 / (hidden + shape.words))
    return {
        "embedding": uniform(keys[0], (shape.words, embed), WIDTH),
        "input": uniform(keys[1], (embed, 4 * hidden), cell),
        "recurrent": uniform(keys[2], (hidden, 4 * hidden), cell),
        "bias": jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0),
        "output": uniform(keys[3], (hidden, shape.columns), out),
        "output_bias": jnp.zeros(shape.columns),
    }


def product(a: Array, b: Array, kind: Any, out: Any = jnp.float32) -> Array:
    """a @ b with factors rounded to `kind`, summed in float32."""
    return jnp.matmul(a.astype(kind), b.astype(kind), preferred_element_type=jnp.dtype(out))


def _gates(z: Array) -> list[Array]:
    i, f, g, o = jnp.split(z, 4, -1)
    return [jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recur(unroll: int, inputs: Array, recurrent: Array, begin: Array) -> Array:
    """The states [L, n, H] of an LSTM; `inputs` [L, n, 4H] to gates i, f, g, o; `begin` [L, n] is true where the state is reset."""
    return _recur(unroll, inputs, recurrent, begin)[0]


def _recur(unroll: int, inputs: Array, recurrent: Array, begin: Array) -> tuple[Array, Any]:
    kind, keep = inputs.dtype, ~begin[..., None]
    weights = recurrent.astype(kind)
    # Reset at the end of a step: at its start the reset would be part of the product, which is slower so.
    keep_next = jnp.concatenate([keep[1:], keep[:1]])

    def step(carry: tuple[Array, Array], now: tuple[Array, Array]) -> Any:
        h, c = carry
        into, kept = now
        i, f, g, o = _gates(into.astype(jnp.float32) + product(h, weights, kind))
        c = f * c + i * g
        h = (o * jnp.tanh(c)).astype(kind)
        carry = (jnp.where(kept, h, 0), jnp.where(kept, c, 0))
        return carry, (h, c, jnp.concatenate([i, f, g, o], -1).astype(kind))

    first = jnp.zeros((inputs.shape[1], recurrent.shape[0]))
    xs = (inputs, keep_next)
    _, (h, c, gates) = lax.scan(step, (first.astype(kind), first), xs, unroll=unroll)
    return h, (h, c, gates, recurrent, keep)


def _recur_back(unroll: int, kept: Any, d_out: Array) -> tuple[Array, Array, None]:
    h, c, gates, recurrent, keep = kept
    kind = h.dtype
    weights = recurrent.T.astype(kind)
    before = lambda a: jnp.where(keep, jnp.concatenate([jnp.zeros_like(a[:1]), a[:-1]]), 0)

    def step(carry: tuple[Array, Array], now: Any) -> Any:
        d_h, d_c = carry
        d_out, c, c_before, gates, kept = now
        i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, -1)
        d_h = d_h + d_out
        tanh = jnp.tanh(c)
        d_c = d_c + d_h * o * (1 - tanh**2)
        parts = [
            d_c * g * i * (1 - i), d_c * c_before * f * (1 - f),
            d_c * i * (1 - g**2), d_h * tanh * o * (1 - o),
        ]  # fmt: skip
        d_z = jnp.concatenate(parts, -1).astype(kind)
        d_h = jnp.where(kept, product(d_z, weights, kind), 0)
        return (d_h, jnp.where(kept, d_c * f, 0)), d_z

    zero = jnp.zeros(h.shape[1:])
    xs = (d_out.astype(jnp.float32), c, before(c), gates, keep)
    _, d_z = lax.scan(step, (zero, zero), xs, reverse=True, unroll=unroll)
    flat = lambda a: a.reshape(-1, a.shape[-1])
    return d_z, product(flat(before(h)).T, flat(d_z), kind), None


recur.defvjp(_recur, _recur_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def word_scores(kind: str, states: Array, table: Array, bias: Array, y: Array) -> Array:
    """log softmax(states @ table + bias) at the words y, [T]."""
    return _word_scores(kind, states, table, bias, y)[0]


def _word_scores(kind: str, states: Array, table: Array, bias: Array, y: Array) -> Any:
    logits = product(states, table, kind, kind)
    total = logsumexp(logits, bias)
    return chosen(logits, y) + bias[y] - total, (states, table, bias, y, logits, total)


def logsumexp(logits: Array, bias: Array) -> Array:
    """log sum exp(logits + bias) of each row, in one pass: the largest so far, and the sum relative to it."""
    z = logits.astype(jnp.float32) + bias

    def joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        most = jnp.maximum(a[0], b[0])
        return most, a[1] * jnp.exp(a[0] - most) + b[1] * jnp.exp(b[0] - most)

    none = (jnp.float32(np.finfo(np.float32).min), jnp.float32(0))
    most, total = lax.reduce((z, jnp.ones_like(z)), none, joined, (z.ndim - 1,))
    return most + jnp.log(total)


def chosen(logits: Array, y: Array) -> Array:
    """The logits [T, V] at the words y."""
    return jnp.take_along_axis(logits, y[:, None], -1)[:, 0].astype(jnp.float32)


def _word_scores_back(kind: str, kept: Any, d_out: Array) -> tuple[Array, Array, Array, None]:
    states, table, bias, y, logits, total = kept
    share = jnp.exp(logits.astype(jnp.float32) + bias - total[:, None])
    truth = y[:, None] == jnp.arange(len(bias))
    d_logits = (d_out[:, None] * (truth - share)).astype(kind)
    d_states = product(d_logits, table.T, kind).astype(states.dtype)
    # The bias is one more row of the table, whose state is 1: a sum over words of its own would be a pass over all logits.
    ones = jnp.ones((len(states), ROWS - states.shape[1] % ROWS), states.dtype)
    d_rows = product(jnp.concatenate([states, ones], 1).T, d_logits, kind)
    return d_states, d_rows[: len(table)], d_rows[len(table)], None


word_scores.defvjp(_word_scores, _word_scores_back)


def chunked(shape: Shape, states: Array, table: Array, bias: Array, y: Array) -> Array:
    """`word_scores`, with the logits of `shape.chunk` words in memory at a time; the way back makes them again."""
    num, size = len(y), shape.chunk or len(y)
    if size >= num:
        return word_scores(shape.kind, states, table, bias, y)
    parts = -(-num // size)
    cut = lambda a: jnp.pad(a, [(0, parts * size - num)] + [(0, 0)] * (a.ndim - 1))
    folded = jax.tree.map(lambda a: cut(a).reshape(parts, size, *a.shape[1:]), (states, y))
    one = jax.checkpoint(lambda part: word_scores(shape.kind, part[0], table, bias, part[1]))
    return lax.map(one, folded).reshape(-1)[:num]


def log_shares(shape: Shape, ids: np.ndarray) -> np.ndarray:
    """log((count + 1) / all) of every word in a text, as float32; -1e9 for columns beyond the vocabulary.

    Added to the logits: so the network starts from, and its prior is centred on, how frequent words are.
    """
    counts = np.bincount(ids, minlength=shape.words) + 1.0
    shares = np.full(shape.columns, -1e9, np.float32)
    shares[: shape.words] = np.log(counts / counts.sum())
    return shares


def dropped(key: Array | None, rate: float, a: Array) -> Array:
    """`a` with a share `rate` of its entries at zero and the others scaled up; without a key as it is."""
    if key is None or rate == 0:
        return a
    kept = jax.random.bernoulli(key, 1 - rate, a.shape)
    return jnp.where(kept, a / jnp.asarray(1 - rate, a.dtype), jnp.zeros((), a.dtype))


def states(
    shape: Shape,
    params: Params,
    x: Array,
    begin: Array,
    *,
    key: Array | None = None,
    rate: float = 0.0,
) -> Array:
    """The LSTM's outputs [L, n, H] for words x [L, n]; with a key, dropout on what goes in and what comes out."""
    into, out = (None, None) if key is None else jax.random.split(key)
    words = dropped(into, rate, params["embedding"][x].astype(shape.kind))
    inputs = jnp.matmul(words, params["input"].astype(shape.kind)) + params["bias"].astype(
        shape.kind
    )
    return dropped(out, rate, recur(shape.unroll, inputs, params["recurrent"], begin))


def _by_time(rows: Any) -> list[Array]:
    """x, y and start of a batch [n, L], as arrays [L, n]."""
    x, y, begin = (rows[name].T for name in Rows._fields)
    return [x.astype(jnp.int32), y.astype(jnp.int32), begin]


def likelihood(shape: Shape, shares: np.ndarray, rate: float) -> Callable[..., Any]:
    """log p(words of each row | params) [n], as a stateful target wants it; padding does not count."""

    def log_likelihood(params: Params, batch: Any, carried: Any, key: Array) -> tuple[Array, Any]:
        x, y, begin = _by_time(batch)
        out = states(shape, params, x, begin, key=key, rate=rate).reshape(y.size, -1)
        each = chunked(shape, out, params["output"], params["output_bias"] + shares, y.ravel())
        return jnp.sum(jnp.where(y == PAD, 0, each.reshape(y.shape)), 0), carried

    return log_likelihood


def target(shape: Shape, shares: np.ndarray, rate: float, num_data: int, prior: float) -> Target:
    """The posterior of the network's weights given `num_data` rows, with a Gaussian prior."""
    return Target(
        log_prior=GaussianPrior(prior),
        log_likelihood=likelihood(shape, shares, rate),
        num_data=num_data,
        stateful=True,
    )


@functools.partial(jax.jit, static_argnums=0)
def _sums(shape: Shape, shares: Array, particles: Params, batches: Any) -> Array:
    """By batch, summed over its words: log-probabilities of each network, and last of the mixture. [B, M + 1]"""

    def one(x: Array, y: Array, begin: Array, params: Params) -> Array:
        out = states(shape, params, x, begin).reshape(y.size, -1)
        logits, bias = product(out, params["output"], shape.kind), params["output_bias"] + shares
        return chosen(logits, y.ravel()) + bias[y.ravel()] - jax.nn.logsumexp(logits + bias, -1)

    def batch(rows: Any) -> Array:
        x, y, begin = _by_time(rows)
        each = lax.map(functools.partial(one, x, y, begin), particles)
        mixture = jax.nn.logsumexp(each, 0) - np.log(len(each))
        return jnp.sum(jnp.where(y.ravel() == PAD, 0, jnp.vstack([each, mixture])), 1)

    return lax.map(batch, batches)


def perplexities(
    shape: Shape, shares: np.ndarray, particles: Params, rows: Rows, batch: int
) -> np.ndarray:
    """exp(-mean log p(word)) of every network, and last of their mixture 1/M sum_m p_m.

    The mixture is of the networks' probabilities of each word given the words before it. In memory are the logits of one network
    for one batch.
    """
    num = -(-len(rows.x) // batch)
    fill = lambda a: np.pad(a, [(0, num * batch - len(a)), (0, 0)]).reshape(num, batch, -1)
    sums = _sums(shape, shares, particles, {name: fill(a) for name, a in rows._asdict().items()})
    return np.exp(-np.asarray(sums, np.float64).sum(0) / rows.tokens)
