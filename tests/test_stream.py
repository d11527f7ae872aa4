"""Streams: the same batches as in memory, bit for bit, read a block ahead; positions, and data that do not fit."""

import itertools
import signal
import sys
import threading
from concurrent.futures import wait

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import ready
from particlax.folder import Folder
from particlax.streams import Feed

COMPILE_FAST = True

streams = sys.modules["particlax.streams"]
ROWS, SIZE = 200, 7


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 5)).astype(np.float32)
    return {"x": x, "y": (x @ rng.normal(size=5) > 0).astype(np.int32)}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 steps: a batch has 7 rows of 24 bytes."""
    monkeypatch.setattr(streams, "STREAM_BYTES", 4 * SIZE * 24)


def net(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def networks(num=4):
    keys = jax.random.split(jax.random.key(5))
    return {
        "a": jax.random.normal(keys[0], (num, 5, 6)),
        "b": jax.random.normal(keys[1], (num, 6, 2)),
    }


def jitter(key, batch):
    return {**batch, "x": batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)}


TARGET = px.Target(
    log_prior=lambda w: -0.5 * jnp.sum(w**2),
    log_likelihood=lambda w, batch: jax.nn.log_sigmoid((2 * batch["y"] - 1) * (batch["x"] @ w)),
    num_data=ROWS,
)
NETWORK = px.networks.classifier(net, num_data=ROWS)
FLOWS = {
    "sgld": px.sgld(TARGET, step_size=1e-3),
    "svgd": px.svgd(TARGET, optimizer=optax.adam(0.01)),
    "network": px.pi_sgld(NETWORK, optimizer=optax.adagrad(0.1)),
}


def cloud(num=4):
    return jax.random.normal(jax.random.key(5), (num, 5))


def go(flow, data, steps=50, start=None, **options):
    start = cloud() if start is None else start
    key = jax.random.key(0)
    return px.run(flow, start, steps=steps, key=key, data=data, progress=False, **options)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "transform"), [("sgld", None), ("svgd", None), ("network", jitter)]
)
def test_equals_minibatches_bit_for_bit(name, transform, arrays, small_blocks, tmp_path):
    """Fifty steps: thirteen blocks, two epochs, from files on the disk."""
    for leaf, rows in arrays.items():
        np.save(tmp_path / f"{leaf}.npy", rows)
    files = {leaf: np.load(tmp_path / f"{leaf}.npy", mmap_mode="r") for leaf in arrays}
    assert isinstance(files["x"], np.memmap)
    start = networks() if name == "network" else cloud()
    inside = go(FLOWS[name], px.Minibatches(arrays, SIZE, transform), start=start)
    streamed = go(FLOWS[name], px.Stream(files, SIZE, transform=transform), start=start)
    assert same(inside.state, streamed.state)
    assert same(inside.log_density, streamed.log_density)


def test_equals_minibatches_in_float64(arrays, x64):
    wide = {"x": arrays["x"].astype(np.float64), "y": arrays["y"].astype(np.int64)}
    start = cloud().astype(jnp.float64)
    flow = FLOWS["sgld"]
    inside = go(flow, px.Minibatches(wide, SIZE), 9, start)
    assert inside.particles.dtype == jnp.float64
    assert same(inside.state, go(flow, px.Stream(wide, SIZE), 9, start).state)


def test_float64_on_the_disk_is_read_as_in_memory(arrays):
    wide = {"x": arrays["x"].astype(np.float64) / 3, "y": arrays["y"].astype(np.int64)}
    flow = FLOWS["sgld"]
    assert same(go(flow, px.Minibatches(wide, SIZE)).state, go(flow, px.Stream(wide, SIZE)).state)


@pytest.mark.parametrize("cut", [1, 4, 6, 13])
def test_resumes_in_the_middle_of_a_block(cut, arrays, small_blocks):
    flow, data = FLOWS["svgd"], px.Stream(arrays, SIZE)
    whole = go(flow, data, 20)
    first = go(flow, data, cut)
    assert same(whole.state, go(flow, data, 20 - cut, first.state).state)


def test_history_and_observers_see_streamed_steps(arrays, small_blocks):
    flow, seen = FLOWS["sgld"], []
    options = {"thin": 3, "observers": lambda s: seen.append(int(s.state.step)), "observe_every": 5}
    streamed = go(flow, px.Stream(arrays, SIZE), 17, **options)
    assert seen == [5, 10, 15, 17]
    inside = go(flow, px.Minibatches(arrays, SIZE), 17, thin=3)
    assert same(streamed.history.particles, inside.history.particles)


def test_one_trace(arrays, small_blocks):
    calls = []

    def counted(w, batch):
        calls.append(1)
        return -jnp.abs(batch["x"] @ w)

    target = px.Target(log_prior=lambda w: 0.0, log_likelihood=counted, num_data=ROWS)
    flow = px.sgld(target, step_size=1e-3)
    for steps in (50, 50, 42):
        go(flow, px.Stream(arrays, SIZE), steps)
    assert len(calls) == 1


def test_no_steps(arrays):
    assert same(go(FLOWS["sgld"], px.Stream(arrays, SIZE), 0).particles, cloud())


class Rows:
    """An array that is read in rising order, each row once, as HDF5 wants it; notes who reads what."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.reads, self.threads = [], set()

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __getitem__(self, rows):
        assert np.all(np.diff(rows) > 0)
        self.reads.append(len(rows))
        self.threads.add(threading.current_thread())
        return self.values[rows]


def test_reads_blocks_of_rows_in_a_thread(arrays, small_blocks):
    source = {leaf: Rows(values) for leaf, values in arrays.items()}
    result = go(FLOWS["sgld"], px.Stream(source, SIZE), 22)
    assert same(result.state, go(FLOWS["sgld"], px.Minibatches(arrays, SIZE), 22).state)
    assert source["x"].reads == [28, 28, 28, 28, 28, 14]  # never more than a block
    (thread,) = source["x"].threads  # one for all blocks
    assert thread.name == "particlax-stream"
    thread.join(5.0)
    assert not thread.is_alive()


def test_the_thread_ends_with_its_feed(arrays, small_blocks, key):
    feed = Feed(px.Stream(Rows(arrays["x"]), SIZE), key, (0, 0, 100))
    feed.at(0)
    loader = feed.loader
    del feed
    loader.join(5.0)
    assert not loader.is_alive()


def test_the_next_block_is_read_while_this_one_is_used(arrays, small_blocks, key):
    source = Rows(arrays["x"])
    feed = Feed(px.Stream(source, SIZE), key, (0, 0, 100))
    feed.at(0)
    wait([feed.coming])
    assert len(source.reads) == 2
    assert feed.room(3) == 1
    feed.at(4)
    wait([feed.coming])
    assert len(source.reads) == 3
    feed.close()


# ------------------------------------------------------------------------------------- batches as they come


def batches_of(arrays, order):
    """Batch number s has rows order(s), from any step on."""

    def batches(step):
        for now in itertools.count(step):
            yield {leaf: rows[order(now)] for leaf, rows in arrays.items()}

    return batches


def test_iterators(arrays, small_blocks):
    """Rows in file order, one loop by hand against the stream."""
    order = lambda step: np.arange(step * SIZE, (step + 1) * SIZE) % ROWS
    flow, key = FLOWS["sgld"], jax.random.key(0)
    streamed = go(flow, px.Stream(batches_of(arrays, order), num_data=ROWS), 20)
    state, step = flow.init(cloud()), jax.jit(flow.step)
    for t in range(20):
        state, _ = step(key, state, {leaf: rows[order(t)] for leaf, rows in arrays.items()})
    np.testing.assert_allclose(streamed.particles, state.particles, rtol=1e-5, atol=1e-6)


def test_iterators_resume(arrays, small_blocks):
    order = lambda step: np.random.default_rng(step).integers(0, ROWS, SIZE)
    flow, data = FLOWS["svgd"], px.Stream(batches_of(arrays, order), num_data=ROWS)
    first = go(flow, data, 6)
    assert same(go(flow, data, 20).state, go(flow, data, 14, first.state).state)


def test_readers_may_reuse_their_buffers(arrays, small_blocks):
    order = lambda step: np.random.default_rng(step).integers(0, ROWS, SIZE)
    fresh = batches_of(arrays, order)

    def reused(step):
        buffer = {leaf: np.zeros((SIZE, *rows.shape[1:]), rows.dtype) for leaf, rows in arrays.items()}  # fmt: skip
        for batch in fresh(step):
            for leaf, rows in batch.items():
                buffer[leaf][:] = rows
            yield buffer

    runs = [go(FLOWS["sgld"], px.Stream(source, num_data=ROWS)) for source in (fresh, reused)]
    assert same(runs[0].state, runs[1].state)


def test_slow_batches_are_used_as_they_come(arrays, monkeypatch):
    """While the source hangs at one batch, those before it are stepped with, and the run still looks up."""
    monkeypatch.setattr(streams, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(ready, "WAIT_SECONDS", 0.05)
    order = lambda step: np.random.default_rng(step).integers(0, ROWS, SIZE)
    good, free, seen = batches_of(arrays, order), threading.Event(), []

    def hangs(step):
        for now, batch in enumerate(good(step), step):
            if now == 6:
                assert free.wait(60)
            yield batch

    def watch(snapshot):
        seen.append(int(snapshot.state.step))
        if seen[-1] == 6:
            free.set()

    slow = go(FLOWS["sgld"], px.Stream(hangs, num_data=ROWS), 12, observers=watch, observe_every=1)
    assert seen == list(range(1, 13))
    assert same(slow.state, go(FLOWS["sgld"], px.Stream(good, num_data=ROWS), 12).state)


def test_signals_do_not_wait_for_slow_batches(arrays, monkeypatch, tmp_path, handlers):
    monkeypatch.setattr(streams, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(ready, "WAIT_SECONDS", 0.05)
    good, free = batches_of(arrays, lambda step: np.arange(SIZE)), threading.Event()
    there = threading.Event()

    def hangs(step):
        for now, batch in enumerate(good(step), step):
            if now == 6:
                assert there.wait(60)
                signal.raise_signal(signal.SIGTERM)  # noted by the main thread
                free.wait(60)
            yield batch

    watch = {"observers": lambda s: there.set() if int(s.state.step) == 6 else None, "observe_every": 1}  # fmt: skip
    with pytest.raises(SystemExit) as end:
        go(FLOWS["sgld"], px.Stream(hangs, num_data=ROWS), 12, checkpoint=tmp_path / "run", **watch)
    assert not free.is_set()
    free.set()
    assert end.value.code == 75
    assert px.checkpoints.load(tmp_path / "run").step == 6


def test_nothing_is_saved_before_the_first_step(arrays, monkeypatch, tmp_path):
    """However long its batch takes: a folder without a step is free for another run."""
    monkeypatch.setattr(streams, "WAIT_SECONDS", 0.0)
    data = px.Stream(batches_of(arrays, lambda step: np.arange(SIZE)), num_data=ROWS)
    saved = px.Checkpoints(tmp_path / "run", every=1, keep=20)
    go(FLOWS["sgld"], data, 4, checkpoint=saved)
    assert Folder(tmp_path / "run").steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_rows_of_every_kind_of_key(kind, arrays, small_blocks):
    """Those of Minibatches, wherever blocks begin."""
    key, plain = jax.random.key(1, impl=kind), px.Minibatches(arrays, SIZE)
    used = jax.random.fold_in(key, 2**31 - 1)
    for first in (0, 3):
        feed = Feed(px.Stream(arrays, SIZE), used, (0, first, 12))
        for step in range(first, 12):
            found = feed.at(step).batch(used, jnp.int32(step))
            assert same(found, plain.batch(used, jnp.int32(step)))
        feed.close()


def test_a_reader_that_exits_costs_no_step(arrays, tmp_path):
    def leaves(step):
        yield from itertools.islice(
            batches_of(arrays, lambda step: np.arange(SIZE))(step), 8 - step
        )
        raise SystemExit(3)

    with pytest.raises(SystemExit) as end:
        go(FLOWS["sgld"], px.Stream(leaves, num_data=ROWS), 20, checkpoint=tmp_path / "run")
    assert end.value.code == 3
    assert px.checkpoints.load(tmp_path / "run").step == 8


def test_data_that_are_still_bad_say_where_the_run_is(arrays, tmp_path):
    """Also when it resumes; mended arrays are other data, as the note says."""
    bad = {"x": arrays["x"].copy(), "y": arrays["y"]}
    used = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
    bad["x"][int(px.Minibatches(arrays, SIZE).indices(used, jnp.array(5))[0])] = np.nan
    for _ in range(2):
        with pytest.raises(px.errors.DataError) as error:
            go(FLOWS["sgld"], px.Stream(bad, SIZE), 9, checkpoint=tmp_path / "run")
        assert int(error.value.state.step) == 5
        assert any("00000005" in note and "strict=False" in note for note in error.value.__notes__)
    again = px.Checkpoints(tmp_path / "run", strict=False)
    whole = go(FLOWS["sgld"], px.Stream(arrays, SIZE), 9)
    assert same(whole.state, go(FLOWS["sgld"], px.Stream(arrays, SIZE), 9, checkpoint=again).state)


def test_the_state_of_an_inner_run_stays_its_own(arrays):
    def inner(snapshot):
        short = px.Stream(batches_of(arrays, lambda s: np.arange(SIZE - (s == 2))), num_data=ROWS)
        go(FLOWS["sgld"], short, 9)

    with pytest.raises(px.errors.DataError, match="the batch of step 2") as error:
        go(FLOWS["sgld"], px.Stream(arrays, SIZE), 9, observers=inner, observe_every=5)
    assert int(error.value.state.step) == 2


def test_an_error_comes_when_it_is_its_batchs_turn(arrays, tmp_path):
    order = lambda step: np.random.default_rng(step).integers(0, ROWS, SIZE)

    def breaks(step):
        yield from itertools.islice(batches_of(arrays, order)(step), 17 - step)
        raise OSError("the disk is gone")

    saved = {"checkpoint": tmp_path / "run", "every": 5}
    with pytest.raises(OSError, match="the disk is gone"):
        go(FLOWS["sgld"], px.Stream(breaks, num_data=ROWS), 30, **saved)
    assert px.checkpoints.load(tmp_path / "run").step == 17


def test_a_finished_run_needs_no_batches(arrays, tmp_path, capsys):
    order = lambda step: np.random.default_rng(step).integers(0, ROWS, SIZE)
    ends = lambda step: itertools.islice(batches_of(arrays, order)(step), 10 - step)
    run = lambda: go(FLOWS["sgld"], px.Stream(ends, num_data=ROWS), 10, checkpoint=tmp_path, every=5)  # fmt: skip
    assert same(run().state, run().state)
    assert "finished at step 10 of 10" in capsys.readouterr().err


class Dataset:
    """A stand-in for a Grain dataset: its iterators tell and set their position, and nothing else."""

    def __init__(self, arrays, as_bytes):
        self.arrays, self.as_bytes = arrays, as_bytes

    def __iter__(self):
        return Place(self)


class Place:
    def __init__(self, dataset):
        self.dataset, self.at = dataset, 0

    def __iter__(self):
        return self

    def __next__(self):
        rows = np.random.default_rng(self.at).integers(0, ROWS, SIZE)
        self.at += 1
        return jax.tree.map(lambda leaf: leaf[rows], self.dataset.arrays)

    def get_state(self):
        return str(self.at).encode() if self.dataset.as_bytes else {"next": self.at}

    def set_state(self, state):
        self.at = int(state) if self.dataset.as_bytes else state["next"]


class Live(Dataset):
    """One whose iterators tell what they go on counting with."""

    def __iter__(self):
        place, state = Place(self), {"next": 0}

        class Counting:
            __iter__ = lambda self: self

            def __next__(self):
                place.at = state["next"]
                state["next"] += 1
                return next(place)

            def get_state(self):
                return state

            def set_state(self, given):
                state.update(given)

        return Counting()


def test_positions_are_kept_as_they_were(arrays, small_blocks, tmp_path):
    flow, data = FLOWS["sgld"], px.Stream(Live(arrays, False), num_data=ROWS)
    saved = {"checkpoint": tmp_path / "run", "every": 3}
    with pytest.raises(StopError):
        go(flow, data, 14, **saved, **crash_at(7))
    assert same(go(flow, data, 14, **saved).state, go(flow, data, 14).state)


def test_positions_in_numbers_of_numpy_and_in_objects():
    assert ready._as_json({"next": np.int64(3), "rows": np.arange(2)}) == {
        "next": 3,
        "rows": [0, 1],
    }
    assert ready._from_json(ready._as_json(b"\x01a")) == b"\x01a"
    with pytest.raises(px.errors.DataError, match="JSON cannot hold"):
        ready._as_json({"next": object()})
    with pytest.raises(px.errors.DataError, match="dicts with strings as keys"):
        ready._as_json({"shards": [{0: 5}]})


class StopError(BaseException):
    pass


def crash_at(step):
    def watch(snapshot):
        if int(snapshot.state.step) >= step:
            raise StopError

    return {"observers": watch, "observe_every": 1}


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("at", [3, 6, 9])
def test_positions_are_part_of_the_checkpoint(at, as_bytes, arrays, small_blocks, tmp_path, capsys):
    flow, data = FLOWS["sgld"], px.Stream(Dataset(arrays, as_bytes), num_data=ROWS)
    whole = go(flow, data, 14)
    saved = {"checkpoint": tmp_path / "run", "every": 3}
    with pytest.raises(StopError):
        go(flow, data, 14, **saved, **crash_at(at + 1))
    assert same(whole.state, go(flow, data, 14, **saved).state)
    assert f"resuming at step {at} of 14" in capsys.readouterr().err


def test_rows_resume_from_a_checkpoint_and_may_move_into_memory(arrays, small_blocks, tmp_path):
    flow = FLOWS["svgd"]
    saved = {"checkpoint": tmp_path / "run", "every": 3}
    with pytest.raises(StopError):
        go(flow, px.Stream(arrays, SIZE), 14, **saved, **crash_at(8))
    resumed = go(flow, px.Minibatches(arrays, SIZE), 14, **saved)
    assert same(resumed.state, go(flow, px.Stream(arrays, SIZE), 14).state)


def test_grain(arrays, tmp_path):
    grain = pytest.importorskip("grain")

    class Source:
        def __len__(self):
            return ROWS

        def __getitem__(self, row):
            return jax.tree.map(lambda leaf: leaf[row], arrays)

    made = grain.MapDataset.source(Source()).shuffle(seed=1).repeat().batch(SIZE)
    data = px.Stream(made.to_iter_dataset(), num_data=ROWS)
    flow, saved = FLOWS["sgld"], {"checkpoint": tmp_path / "run", "every": 4}
    whole = go(flow, data, 60)
    with pytest.raises(StopError):
        go(flow, data, 60, **saved, **crash_at(50))
    assert same(whole.state, go(flow, data, 60, **saved).state)


# ------------------------------------------------------------------------------------------------ bad data


def raises(data, *words, steps=20, flow=FLOWS["sgld"], start=None):
    with pytest.raises(px.errors.DataError) as error:
        go(flow, data(), steps, start)
    for word in words:
        assert word in str(error.value)
    names = {thread.name for thread in threading.enumerate() if thread.is_alive()}
    assert "particlax-stream" not in names


def test_bad_streams(arrays, small_blocks):
    order = lambda step: np.arange(SIZE)
    raises(lambda: px.Stream(arrays, 0), "batch_size is 0", "positive")
    raises(lambda: px.Stream(arrays, ROWS + 1), "at most 200")
    raises(lambda: px.Stream({"x": arrays["x"], "y": arrays["y"][:9]}, 3), "same number of rows")
    raises(lambda: px.Stream(arrays, SIZE, num_data=9), "num_data is 9", "200 rows")
    raises(lambda: px.Stream(batches_of(arrays, order)), "without num_data", "factor N / n")
    raises(lambda: px.Stream(batches_of(arrays, order), 3, num_data=9), "ready-made")
    raises(lambda: px.Stream(arrays, SIZE, transform=3), "transform is 3")
    half = {leaf: rows[:150] for leaf, rows in arrays.items()}
    raises(lambda: px.Stream(half, SIZE), "150 rows", "num_data=200")


def test_streams_that_end(arrays, small_blocks):
    ends = lambda step: iter([jax.tree.map(lambda leaf: leaf[:SIZE], arrays)] * 10)
    raises(lambda: px.Stream(ends, num_data=ROWS), "ended before the batch of step 10", "Repeat")
    assert int(go(FLOWS["sgld"], px.Stream(ends, num_data=ROWS), 10).state.step) == 10
    raises(lambda: px.Stream(lambda step: iter([]), num_data=ROWS), "batch of step 0")


def test_batches_of_another_shape(arrays, small_blocks):
    order = lambda step: np.arange(SIZE if step != 6 else 3)
    data = lambda: px.Stream(batches_of(arrays, order), num_data=ROWS)
    raises(data, "batch of step 6", "float32[3, 5]", "float32[7, 5]", "Drop the remainder")


def test_a_row_that_is_not_finite_names_its_step(arrays, small_blocks, key):
    bad = {"x": arrays["x"].copy(), "y": arrays["y"]}
    bad["x"][17, 2] = np.nan
    plain = px.Minibatches(arrays, SIZE)
    used = jax.random.fold_in(key, 2**31 - 1)
    step = next(t for t in range(99) if 17 in plain.indices(used, jnp.array(t)))
    raises(lambda: px.Stream(bad, SIZE), f"batch of step {step}", "['x']", "not finite", steps=60)


@pytest.mark.parametrize("ready_made", [False, True])
def test_all_steps_before_data_that_are_not_finite_are_taken(
    ready_made, arrays, small_blocks, tmp_path
):
    """The bad batch is in the middle of a block; the state before it comes with the error, and is saved."""
    if ready_made:
        good = batches_of(arrays, lambda step: (np.arange(SIZE) + step) % ROWS)
        step = 10

        def batches(first):
            for now, batch in enumerate(good(first), first):
                yield {**batch, "x": batch["x"] * (np.nan if now == step else 1)}

        data, whole = (px.Stream(some, num_data=ROWS) for some in (batches, good))
    else:
        used = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
        whole = px.Minibatches(arrays, SIZE)
        bad = {"x": arrays["x"].copy(), "y": arrays["y"]}
        step = 10
        bad["x"][int(whole.indices(used, jnp.array(step))[0]), 2] = np.nan
        data = px.Stream(bad, SIZE)
    with pytest.raises(px.errors.DataError, match=f"batch of step {step} is not finite") as error:
        go(FLOWS["sgld"], data, 60, checkpoint=tmp_path / "run", every=100)
    wanted = go(FLOWS["sgld"], whole, step).state
    assert same(wanted, error.value.state)
    seen = px.checkpoints.load(tmp_path / "run", flow=FLOWS["sgld"], particles=cloud())
    assert same(wanted, seen.state)
    assert any("00000010" in note for note in error.value.__notes__)


def test_labels_are_checked_on_the_disk(arrays, tmp_path):
    np.save(tmp_path / "y.npy", arrays["y"] + 1)
    bad = {"x": arrays["x"], "y": np.load(tmp_path / "y.npy", mmap_mode="r")}
    network = {"flow": FLOWS["network"], "start": networks()}
    raises(lambda: px.Stream(bad, SIZE), "from 1 to 2", "2 logits", **network)
    raises(
        lambda: px.Stream({"x": arrays["x"]}, SIZE), "expected a dict with inputs 'x'", **network
    )


def test_sources_that_cannot_resume_are_refused(arrays):
    class Forward:
        def __iter__(self):
            return iter([jax.tree.map(lambda leaf: leaf[:SIZE], arrays)] * 99)

    raises(lambda: px.Stream(Forward(), num_data=ROWS), "no get_state", "function of the step")


def test_a_dataset_goes_on_from_a_checkpoint_alone(arrays):
    flow, data = FLOWS["sgld"], px.Stream(Dataset(arrays, False), num_data=ROWS)
    state = go(flow, data, 3).state
    with pytest.raises(px.errors.DataError, match="nothing says where its data were"):
        go(flow, data, 3, state)


def test_errors_of_the_source_come_through(arrays, small_blocks):
    def batches(step):
        yield from [jax.tree.map(lambda leaf: leaf[:SIZE], arrays)] * 9
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        go(FLOWS["sgld"], px.Stream(batches, num_data=ROWS), 20)


def test_rows_are_taken_by_position_also_of_pandas_and_other_types(arrays, key):
    pandas = pytest.importorskip("pandas")
    order = np.random.default_rng(1).permutation(ROWS)
    y = pandas.Series(arrays["y"], index=order)  # shuffled labels: by label, others would come

    class Elsewhere:
        """An array whose dtype is not NumPy's, as a torch tensor's."""

        shape, dtype = arrays["x"].shape, "elsewhere.float32"

        def __array__(self, dtype=None, copy=None):
            return arrays["x"]

        def __getitem__(self, rows):
            raise AssertionError("not in its own words")

    flow = px.sgld(TARGET, step_size=1e-3)
    start = px.particles.normal(key, 4, like=jnp.zeros(5))
    run = lambda data: px.run(flow, start, steps=9, key=key, data=data, progress=False).particles
    wanted = np.asarray(run(px.Minibatches(arrays, SIZE)))
    frame = pandas.DataFrame(arrays["x"], index=order)
    for x in (arrays["x"], frame, Elsewhere()):
        found = np.asarray(run(px.Stream({"x": x, "y": y}, SIZE)))
        np.testing.assert_array_equal(found, wanted)


def test_arrays_of_others_with_rows_by_number(key):
    class Lazy:
        shape, dtype = (ROWS, 5), np.dtype("float32")
        values = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)

        def __getitem__(self, rows):
            return self.values[rows]

        def __iter__(self):
            return iter(self.values)

        def __len__(self):
            return ROWS

    stream = px.Stream(Lazy(), SIZE)
    assert (stream.num_data, stream.ready_made) == (ROWS, False)
    found = Feed(stream, key, (0, 0, 3)).at(0).batch(key, jnp.int32(1))
    wanted = px.Minibatches(Lazy.values, SIZE).batch(key, jnp.int32(1))
    np.testing.assert_array_equal(found, wanted)


def test_whole_numbers_that_would_wrap_are_refused(key):
    large = np.arange(ROWS) + 2**32
    target = px.Target(
        log_prior=lambda w: -0.5 * w**2,
        log_likelihood=lambda w, y: -0.5 * (y - w) ** 2,
        num_data=ROWS,
    )
    flow, start = px.sgld(target, step_size=1e-3), jnp.zeros(3)
    run = lambda data: px.run(flow, start, steps=2, key=key, data=data, progress=False)
    ready_made = px.Stream(lambda step: iter([large[:5]] * 9), num_data=ROWS)
    for wrong in (lambda: large, lambda: px.Minibatches(large, SIZE), lambda: px.Stream(large, SIZE), lambda: ready_made):  # fmt: skip
        with pytest.raises(px.errors.DataError, match=r"int64 with numbers from 4294967\d+ to \d+, and JAX holds them as int32.*floats"):  # fmt: skip
            run(wrong())
    run(px.Stream(large - 2**32, SIZE))


def test_lists_of_batches_and_arrays_without_a_batch_size_say_what_to_do(arrays, key):
    batches = [{"x": arrays["x"][:SIZE], "y": arrays["y"][:SIZE]}] * 3
    flow = px.sgld(TARGET, step_size=1e-3)
    with pytest.raises(px.errors.DataError, match=r"the data have 7 rows.*A list of batches goes into px.Stream"):  # fmt: skip
        px.run(flow, jnp.zeros((3, 5)), steps=1, key=key, data=batches, progress=False)
    for wrong in (batches, arrays):
        with pytest.raises(px.errors.DataError, match=r"no batch_size; expected px.Stream\(arrays, 100\).*lambda step"):  # fmt: skip
            px.Stream(wrong, num_data=ROWS)
    two = [{"x": arrays["x"]}, {"x": arrays["x"] + 1}]  # a list is a pytree as any other
    assert px.Minibatches(two, SIZE).batch(key, jnp.int32(0))[1]["x"].shape == (SIZE, 5)


def test_a_batch_in_which_nothing_counts_is_none_too_many(key):
    data = {"x": np.ones((12, 5), np.float32), "y": np.zeros(12, int)}
    mask = np.arange(12) >= 4
    part = lambda i: {name: a[i : i + 4] for name, a in {**data, "mask": mask}.items()}
    parts = [part(i) for i in (0, 4, 8)]
    flow = px.w_sgld_b(px.networks.classifier(net, num_data=12), step_size=1e-3)
    run = lambda data: px.run(flow, networks(3), steps=3, key=key, data=data, progress=False)
    run(px.Stream(lambda step: iter(parts[step:]), num_data=12))
    run(px.Minibatches(data, 4, lambda k, b: {**b, "mask": jnp.arange(4) < 0}))
    with pytest.raises(px.errors.DataError, match="the mask is false everywhere"):
        run({**data, "mask": mask & ~mask})


def test_what_would_wrap_or_overflow_counts_when_it_is_its_turn(key):
    """Steps before it are taken; floats that are too large for float32 are not finite."""
    numbers = np.arange(ROWS)
    target = px.Target(
        log_prior=lambda w: -0.5 * w**2,
        log_likelihood=lambda w, batch: -0.5 * (batch["y"] - w) ** 2,
        num_data=ROWS,
    )
    flow = px.sgld(target, step_size=1e-5)
    run = lambda y: px.run(flow, jnp.zeros(3), steps=9, key=key, data=px.Stream({"y": y}, SIZE), progress=False)  # fmt: skip
    used, turn = jax.random.fold_in(key, 2**31 - 1), 4
    place = int(px.Minibatches(numbers, SIZE).indices(used, jnp.int32(turn))[0])
    for wrong, words in ((2**40, r"data\['y'\] is int64"), (1e300, r"step 4 is not finite")):
        y = numbers.astype(type(wrong))
        y[place] = wrong
        with pytest.raises(px.errors.DataError, match=words) as caught:
            run(y)
        assert int(caught.value.state.step) == turn
