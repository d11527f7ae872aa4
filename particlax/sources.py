"""The data of a run, checked against its target before the first step."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from particlax.checks import refuse_not_finite
from particlax.data import Minibatches, refuse_batches, refuse_words, refuse_wrapped
from particlax.errors import DataError
from particlax.flow import Flow, State
from particlax.streams import Feed, Stream
from particlax.target import num_rows


def checked_data(flow: Flow, state: State, data: Any, key: Array) -> Any:
    """Arrays or minibatches, if the target can use them."""
    wanted = flow.target.num_data
    if wanted is None or data is None:
        return data  # the target itself says what is missing or too much, at the first step
    if isinstance(data, Minibatches):
        num, arrays = data.num_data, data.arrays
        batch = jax.eval_shape(data.batch, key, state.step)
        if data.transform is not None:
            # Only it knows what the target will see: one batch stands for all.
            arrays = data.batch(key, state.step)
    else:
        refuse_batches(data)
        refuse_words(data)
        refuse_wrapped(data)
        batch = arrays = data = jax.tree.map(jnp.asarray, data)
        num = num_rows(data)
        refuse_not_finite("the data", data)
    listed = (
        ". A list of batches goes into px.Stream(lambda step: iter(batches[step:]), num_data=N)"
    )
    _refuse_other_size(num, wanted, listed * isinstance(data, list))
    flow.check_data(state, batch, arrays)
    return data


def check_stream(flow: Flow, state: State, data: Stream, feed: Feed, key: Array) -> None:
    """Refuse a stream whose batches the target cannot use."""
    if flow.target.num_data is None:
        return
    _refuse_other_size(data.num_data, flow.target.num_data)
    see = lambda batch: batch if data.transform is None else data.transform(key, batch)
    batch = jax.eval_shape(see, feed.example)
    rows = feed.example if data.ready_made else data.source
    if data.transform is not None:
        size = num_rows(feed.example)
        rows = see(jax.tree.map(lambda leaf: jnp.asarray(leaf[:size]), rows))
    flow.check_data(state, batch, rows)


def _refuse_other_size(num: int, wanted: int, hint: str = "") -> None:
    if num != wanted:
        raise DataError(
            f"the data have {num} rows but the target was made with num_data={wanted}; expected the same "
            f"number, since the likelihood is scaled by num_data / batch size{hint}"
        )
