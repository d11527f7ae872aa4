"""What a network gives, called with what it may need and checked."""

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from particlax.errors import DataError, ParticlaxError, TargetError, told
from particlax.particles import leaf_names

NETWORK = "network"
"""The noise of a regression whose network returns the pair (means, sds)."""
ONE_LOGIT = "One logit z of two classes becomes jnp.stack([0 * z, z], -1)"
NOISE = f"a function of the parameters or {NETWORK!r}"
"""What a regression's noise may be beside a number."""

__all__ = [
    "called",
    "check_labels",
    "numbers",
    "plain",
    "real",
    "refuse_other",
    "refuse_other_labels",
    "refuse_unread",
    "rows_of",
    "trained",
]


def rows_of(batch: Any) -> Any:
    """The inputs of a batch, if it is one of inputs and targets."""
    if not isinstance(batch, Mapping) or not {"x", "y"} <= set(batch):
        came = f"a dict of {sorted(map(str, batch))}" if isinstance(batch, Mapping) else told(batch)
        raise DataError(
            f"the data are {came}; expected a dict with inputs 'x' and targets 'y': {{'x': x, 'y': y}}"
        )
    for name in ("x", "y"):
        if not jax.tree.leaves(batch[name]):
            raise DataError(f"data[{name!r}] is {told(batch[name])}; expected numbers")
    return batch["x"]


def refuse_unread(batch: Any) -> None:
    """Refuse parts of a batch that no likelihood reads: a mask by another name would silently do nothing."""
    rows_of(batch)
    if unread := sorted(set(batch) - {"x", "y", "mask"}):
        near = difflib.get_close_matches(unread[0], ["x", "y", "mask"], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"the data have {unread}, which neither network nor likelihood reads: {hint}expected 'x', 'y' and, where not all labels count, "
            "'mask'. Leave the others out, or drop them in px.Minibatches(transform=)"
        )


def plain(net: Any, params: PyTree, batch: Any, *, pair: bool = False) -> Any:
    """apply(params, x), which must be one array of real numbers, or the pair (means, sds)."""
    return numbers("apply", called(net.apply, params, rows_of(batch)), pair)


def called(apply: Any, params: PyTree, x: Any, *more: Any) -> Any:
    """apply(params, x, ...); what goes wrong in it as one error that says what may be missing."""
    try:
        return apply(params, x, *more)
    except ParticlaxError:
        raise
    except Exception as error:
        gaps = any(leaf is None for leaf in jax.tree.leaves(params, is_leaf=lambda a: a is None))
        parts = "; a partly Bayesian network needs its shared leaves too: flow.init(head, shared=trunk), and for predictions the run's result"
        said = f"{type(error).__name__}: {error}".split(" (http")[0].splitlines()[0]
        raise TargetError(
            f"apply(params, x{', carried' * len(more)}) failed, {said}. If the network needs state or keys (batch norm, dropout), make a "
            f"px.networks.Network with stateful=True and predict with it, not with its apply; or use px.modules{parts * gaps}"
        ) from error


def trained(
    net: Any, params: PyTree, batch: Any, carried: PyTree, key: Any, *, pair: bool = False
) -> Any:
    """forward(params, x, carried, key): outputs, and what the particle carries on."""
    assert net.forward is not None
    x = rows_of(batch)
    try:
        result = net.forward(params, x, carried, key)
    except ParticlaxError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".split(" (http")[0].splitlines()[0]
        if jax.tree.leaves(carried):
            wish = "expected a function of these four that returns (outputs, carried)"
            raise TargetError(f"forward(params, x, carried, key) failed, {said}; {wish}") from error
        raise TargetError(
            f"forward(params, x, carried, key) failed with nothing carried: {said}. A network that keeps state starts with "
            "it: particles, carried = net.init(key, M), then px.run(flow, flow.init(particles, carried), ...)"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise TargetError(
            f"forward returned {type(result).__name__}; expected the pair (outputs, what the particle carries on)"
        )
    before, after = ([_told(leaf) for leaf in jax.tree.leaves(tree)] for tree in (carried, result[1]))  # fmt: skip
    if before and before != after:
        raise TargetError(
            f"forward was given arrays {before} to carry and returned {after}; expected the same shapes and types, step for step"
        )
    return numbers("forward", result[0], pair), result[1]


def check_labels(logits: Any, data: Any) -> None:
    """Refuse labels that are not whole numbers below the number of classes: a gather would not notice."""
    labels, num = data["y"], logits.shape[-1]
    refuse_other_labels(labels, num)
    # Labels on the disk are looked through where they are.
    seen = labels if isinstance(labels, jax.Array) else np.asarray(labels)
    if "mask" in data and np.ndim(data["mask"]):
        seen = seen[np.asarray(data["mask"])]
        if not seen.size:  # none of them counts
            return
    low, high = int(seen.min()), int(seen.max())
    if low < 0 or high >= num:
        raise _label_error(f"from {low} to {high}", num)


def refuse_other_labels(labels: Any, num: int) -> None:
    """Refuse labels that are no whole numbers, for so many classes."""
    if labels.dtype != bool and not jnp.issubdtype(labels.dtype, jnp.integer):
        raise _label_error(f"of dtype {labels.dtype}", num)


def _label_error(seen: str, num: int) -> DataError:
    if num == 1:
        wish = f"expected one for each class. {ONE_LOGIT}"
        return DataError(f"the network has one logit for labels {seen}; {wish}")
    return DataError(
        f"the labels data['y'] are {seen} and the network has {num} logits; expected whole numbers from 0 to "
        f"{num - 1}. Count classes from 0, convert floats with .astype(int), one-hot labels with .argmax(-1)"
    )


def refuse_other(carried: PyTree, new: PyTree) -> None:
    """Refuse what is carried on in another form than it came in."""
    form = lambda tree: (jax.tree.structure(tree), [_told(leaf) for leaf in jax.tree.leaves(tree)])
    if form(carried) != form(new):
        named = lambda tree: dict(zip(leaf_names(tree), form(tree)[1], strict=True))
        raise TargetError(
            f"forward was given {named(carried)} to carry and returned {named(new)}; expected the same names, shapes and types, step for "
            "step. What a network carries it gets from its start: (params, carried)"
        )


def _told(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def numbers(name: str, outputs: Any, pair: bool) -> Any:
    """The network's outputs: one array of real numbers or, for a regression with the network's own noise, (means, sds)."""
    if not pair:
        return real(name, outputs)
    if not isinstance(outputs, (tuple, list)) or len(outputs) != 2:
        raise TargetError(
            f"{name} returned {_form(outputs)} and the noise is {NETWORK!r}; expected the pair (means, sds) of two arrays, for instance "
            "return h[:, 0], jax.nn.softplus(h[:, 1]) + 1e-3"
        )
    means, sds = (real(name, one) for one in outputs)
    if means.shape != sds.shape:
        raise TargetError(
            f"{name} returned means of shape {means.shape} and sds of shape {sds.shape}; expected the same"
        )
    return means, sds


def _form(outputs: Any) -> str:
    shape = getattr(outputs, "shape", None)
    return type(outputs).__name__ if shape is None else f"one array of shape {shape}"


def real(name: str, outputs: Any) -> Array:
    """The network's outputs, if they are one array of real numbers."""
    if not isinstance(outputs, (jax.Array, np.ndarray)):
        two = isinstance(outputs, tuple) and len(outputs) == 2
        hint = f". For the pair (means, sds) of a regression say noise={NETWORK!r}" * two
        raise TargetError(
            f"{name} returned {type(outputs).__name__} as outputs; expected one array with a row for each datum{hint}"
        )
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise TargetError(
            f"{name} returned {outputs.dtype} outputs; expected real numbers, through which a gradient flows"
        )
    return jnp.asarray(outputs)
