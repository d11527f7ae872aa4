"""An LSTM language model for many networks at once: its likelihood with dropout, its gradient by hand, its perplexity.

Rows hold several sequences side by side; where one begins, `start` resets the state. Parameters and sums are float32; the factors of
matrix products have the type `kind`: bfloat16 on a GPU. The softmax has a gradient written by hand, which keeps the logits once, in `kind`.

The softmax is over all words. While a network learns, its denominator may be estimated from the most frequent words and a sample of
the others, weighted so that its mean is the whole sum; perplexities always have the whole sum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.language_recursion import product, recur
from experiments.language_text import PAD, Rows
from particlax.networks import GaussianPrior
from particlax.target import Target

Params = dict[str, Array]
ROWS = 8
"""Matrices have a multiple of so many rows, which is what products in bfloat16 are fast for."""
ALIGN = 128
"""The output table has a multiple of this many rows, which tensor cores want; those beyond the vocabulary have probability 0."""


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
    head: int = 0
    """The first words of the vocabulary, the most frequent ones, which are always in an estimated denominator."""
    samples: int = 0
    """How many of the others stand for all of them; 0 for the whole sum."""

    @property
    def rows(self) -> int:
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
        "output": uniform(keys[3], (shape.rows, hidden), out),
        "output_bias": jnp.zeros(shape.rows),
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def word_scores(kind: str, states: Array, table: Array, bias: Array, y: Array) -> Array:
    """log softmax(states @ table.T + bias) at the words y, [T]."""
    return _word_scores(kind, states, table, bias, y)[0]


def _word_scores(kind: str, states: Array, table: Array, bias: Array, y: Array) -> Any:
    logits = product(states, table.T, kind, kind)
    total = logsumexp(logits, bias)
    return chosen(logits, y) + bias[y] - total, (states, table, bias, y, logits, total)


def logsumexp(logits: Array, bias: Array, counted: Array | bool = True) -> Array:
    """log sum exp(logits + bias) of each row where `counted`, in one pass: the largest so far, and the sum relative to it."""
    z = jnp.where(counted, logits.astype(jnp.float32) + bias, -jnp.inf)

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
    d_states, d_table, d_bias = _products_back(kind, states, table, d_logits)
    return d_states, d_table, d_bias, None


def _products_back(kind: str, states: Array, table: Array, d_logits: Array) -> tuple[Array, ...]:
    """Gradients of the states, the table and the bias from that of the logits."""
    d_states = product(d_logits, table, kind).astype(states.dtype)
    # The bias is one more column of the table, whose state is 1: a sum over words of its own would be a pass over all logits.
    ones = jnp.ones((len(states), ROWS - states.shape[1] % ROWS), states.dtype)
    d_table = product(d_logits.T, jnp.concatenate([states, ones], 1), kind)
    return d_states, d_table[:, : table.shape[1]], d_table[:, table.shape[1]]


word_scores.defvjp(_word_scores, _word_scores_back)


class Sample(NamedTuple):
    """Words beyond the head, and the log of what the exponential of each one's logit counts in the denominator."""

    words: Array
    log_weight: Array


def drawn(shape: Shape, shares: np.ndarray, key: Array) -> Sample:
    """`shape.samples` words beyond the head, with replacement, one from each of as many equal parts of their frequencies.

    A word of frequency q among them is expected samples * q times and counts 1 / (samples * q) each time, so that the mean of the
    weighted sum is the sum over all of them.
    """
    share = np.exp(shares[shape.head : shape.words].astype(np.float64))
    ends = np.cumsum(share / share.sum())
    place = (jnp.arange(shape.samples) + jax.random.uniform(key, (shape.samples,))) / shape.samples
    steps = jnp.asarray(ends[:-1], jnp.float32)
    found = jnp.searchsorted(steps, place, side="right", method="scan_unrolled")
    log_weight = np.log(share.sum() / shape.samples) - shares[shape.head : shape.words]
    return Sample(shape.head + found, jnp.asarray(log_weight, jnp.float32)[found])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sampled_scores(
    shape: Shape, states: Array, layer: tuple[Array, Array], y: Array, sample: Sample
) -> Array:
    """`word_scores` for layer = table, bias, with a denominator of the head, of y itself and of a sample of all other words, [T]."""
    return _sampled_scores(shape, states, layer, y, sample)[0]


def _counted(shape: Shape, y: Array, words: Array) -> Array:
    """Which of the head and the sample count for the words y, [T, head + samples]: y beyond the head is there by itself."""
    return jnp.pad(y[:, None] != words, [(0, 0), (shape.head, 0)], constant_values=True)


def _sampled_scores(
    shape: Shape, states: Array, layer: tuple[Array, Array], y: Array, sample: Sample
) -> Any:
    (table, bias), head, kind = layer, shape.head, shape.kind
    rows = jnp.concatenate([table[:head], table[sample.words]]).astype(kind)
    some = jnp.concatenate([bias[:head], bias[sample.words] + sample.log_weight])
    logits, truth = product(states, rows.T, kind, kind), table[y].astype(kind)
    alone = jnp.sum(states.astype(jnp.float32) * truth.astype(jnp.float32), -1)
    # A word of the head as it is in the denominator, rounded to `kind`, or it could be more probable than 1.
    own = jnp.where(y < head, chosen(logits, jnp.minimum(y, head - 1)), alone) + bias[y]
    others = logsumexp(logits, some, _counted(shape, y, sample.words))
    total = jnp.where(y < head, others, jnp.logaddexp(others, own))
    return own - total, (states, rows, some, y, sample.words, truth, logits, total, own, bias)


def _sampled_scores_back(shape: Shape, kept: Any, d_out: Array) -> Any:
    states, rows, some, y, words, truth, logits, total, own, bias = kept
    head, kind = shape.head, shape.kind
    share = jnp.exp(logits.astype(jnp.float32) + some - total[:, None])
    share = jnp.where(_counted(shape, y, words), share, 0)
    d_logits = (-d_out[:, None] * share).astype(kind)
    d_states, d_rows, d_some = _products_back(kind, states, rows, d_logits)
    d_own = jnp.where(y < head, d_out, -d_out * jnp.expm1(own - total))
    d_states = (d_states + d_own[:, None] * truth).astype(states.dtype)
    places = jnp.concatenate([words, y])
    d_truth = d_own[:, None] * states.astype(jnp.float32)
    d_table = jnp.zeros((len(bias), states.shape[1])).at[:head].set(d_rows[:head])
    d_table = d_table.at[places].add(jnp.concatenate([d_rows[head:], d_truth]))
    d_bias = jnp.zeros_like(bias).at[:head].set(d_some[:head])
    d_bias = d_bias.at[places].add(jnp.concatenate([d_some[head:], d_own]))
    return d_states, (d_table, d_bias), None, None


sampled_scores.defvjp(_sampled_scores, _sampled_scores_back)


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
    """log((count + 1) / all) of every word in a text, as float32; -1e9 for rows beyond the vocabulary.

    Added to the logits: so the network starts from, and its prior is centred on, how frequent words are.
    """
    counts = np.bincount(ids, minlength=shape.words) + 1.0
    shares = np.full(shape.rows, -1e9, np.float32)
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
    # The bias is one more row of the weights, whose input is 1: added by itself it would be a pass over all gates, and its gradient one.
    more = ROWS - words.shape[-1] % ROWS
    words = jnp.concatenate([words, jnp.ones((*x.shape, more), words.dtype)], -1)
    rows = [params["bias"][None], jnp.zeros((more - 1, len(params["bias"])))]
    weights = jnp.concatenate([params["input"], *rows]).astype(shape.kind)
    inputs = jnp.matmul(words, weights)
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
        table, bias, flat = params["output"], params["output_bias"] + shares, y.ravel()
        each: Any
        if shape.samples:
            own = jax.random.fold_in(key, 2)  # dropout splits the key in two
            sample = drawn(shape, shares, own)
            each = sampled_scores(shape, out, (table, bias), flat, sample)
        else:
            each = chunked(shape, out, table, bias, flat)
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
        logits, bias = product(out, params["output"].T, shape.kind), params["output_bias"] + shares
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
