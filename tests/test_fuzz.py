"""Random runs: every outcome is a finite result or a documented error. `python -m experiments run fuzz` is the long version.

Programs are compiled for few shapes and numbers, so that cases are cheap; values, options and bad input vary freely. (The
short version keeps to fewer programs.) The
type checks of the import hook would speak before the library does, so this is a copy of the package without it.
"""

import functools
import importlib
import os
import shutil
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

COMPILE_FAST = True


def _without_hook():
    hooked = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "particlax"}
    for name in hooked:
        del sys.modules[name]
    plain = importlib.import_module("particlax")
    names = ("store", "folder", "streams", "history")
    parts = [importlib.import_module(f"particlax.{name}") for name in names]
    for name in [n for n in sys.modules if n.split(".")[0] == "particlax"]:
        del sys.modules[name]
    sys.modules.update(hooked)
    return plain, *parts


px, store, folder, streams, history = _without_hook()
streams.LONGEST, history.HISTORY_BYTES = 4, 1  # one size of block, one of buffer: fewer programs
LONG = int(os.environ.get("PARTICLAX_FUZZ", "0"))
QUIET = settings(
    deadline=None,
    database=None,
    derandomize=not LONG,  # the same cases every time, unless it is the long run
    suppress_health_check=list(HealthCheck),
)

# -------------------------------------------------------------------------------------------------- storage

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64"]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def leaves(draw):
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    dtype, shape = jnp.dtype(draw(st.sampled_from(DTYPES))), draw(SHAPES)
    raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    values = (
        raw % 2 == 1 if dtype.kind == "b" else raw.view(dtype)
    )  # any bits: also NaN, infinity, -0
    return jnp.asarray(values.reshape(shape))


KEYS = st.one_of(st.text("abc/.'[]\u00e9 ", max_size=4), st.integers(-3, 99))
TREES = st.recursive(
    st.one_of(leaves(), st.none(), st.just(()), st.integers(0, 9).map(jax.random.key)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc/.'[]\u00e9 ", max_size=4), inner, max_size=3),
        st.dictionaries(st.integers(-3, 99), inner, max_size=2),
    ),
    max_leaves=6,
)


def bits(leaf):
    plain = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return str(leaf.dtype), plain.shape, np.asarray(plain).tobytes()


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    place = folder.Folder(tmp_path_factory.mktemp("fuzz") / "run")
    place.lock()
    made = store.Store(place)
    yield made
    made.close()
    place.unlock()


@settings(QUIET, max_examples=LONG // 10 or 25)
@given(tree=TREES)
def test_any_tree_of_arrays_comes_back_bit_for_bit(tree, writer):
    tree = {"state": tree, "log_density": jnp.ones(1)}
    writer.folder.prune(set())
    writer.save(1, tree, {}, lambda: None)
    writer.wait()
    entries = writer.folder.verify(1)["leaves"]
    wanted = [bits(leaf) for leaf in jax.tree.leaves(tree)]
    read = store.read(writer.folder, 1, entries, jax.tree.leaves(tree))
    assert [bits(leaf) for leaf in read] == wanted
    plain = store.read(writer.folder, 1, entries, None)
    assert [bits(leaf) for leaf in plain] == wanted
    FOUND["trees"] += 1


# ----------------------------------------------------------------------------------------------------- runs

ROWS = 7
DATA = np.linspace(-1, 2, ROWS).astype(np.float32)


def bell(x):
    return -0.5 * sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(x))


def likelihood(x, y):
    first = jax.tree.leaves(x)[0].astype(jnp.float32)
    return -0.5 * (y - jnp.sum(first)) ** 2


def cliff(x):
    return jnp.where(jax.tree.leaves(x)[0].astype(jnp.float32).sum() > 2.0, jnp.nan, bell(x))


TARGETS = {
    "bell": lambda: px.Target(bell),
    "cliff": lambda: px.Target(cliff),
    "data": lambda: px.Target(log_prior=bell, log_likelihood=likelihood, num_data=ROWS),
    "shape": lambda: px.Target(lambda x: jnp.ones(3)),
    "rows": lambda: px.Target(log_prior=bell, log_likelihood=likelihood, num_data=ROWS + 1),
}
SAMPLERS = {
    "sgld": lambda t, n: px.sgld(t, step_size=n),
    "sghmc": lambda t, n: px.sghmc(t, step_size=n),
    "psgld": lambda t, n: px.sgld(t, integrator=px.integrators.RMS(n)),
    "svgd": lambda t, n: px.svgd(t, step_size=n),
    "svgd adam": lambda t, n: px.svgd(t, optimizer=optax.adam(n)),
    "blob": lambda t, n: px.w_sgld_b(t, step_size=n, kernel=px.kernels.RBF(1.0)),
    "diagonal": lambda t, n: px.sgld(t, step_size=n, metric=px.metrics.Diagonal()),
}


@functools.cache
def flow(target, sampler, number):
    """One object for each: programs are found again by it."""
    schedules = {
        "schedule": px.schedules.polynomial(0.1),
        "falling": optax.linear_schedule(0.1, -0.1, 8),
    }
    return SAMPLERS[sampler](TARGETS[target](), schedules.get(number, number))


CLOUDS = {
    "matrix": lambda m: np.zeros((m, 2), np.float32),
    "vector": lambda m: np.zeros(m, np.float32),
    "tree": lambda m: {"a": np.zeros((m, 1, 2), np.float32), "b": [np.zeros(m, np.float32), None]},
    "half": lambda m: {"a": np.zeros((m, 2), jnp.bfloat16), "b": (np.zeros((m, 1), np.float16),)},
    "hollow": lambda m: {"a": np.zeros((m, 2), np.float32), "b": np.zeros((m, 0), np.float32)},
    "nothing": lambda m: {"a": np.zeros((m, 0), np.float32)},
    "empty": lambda m: {},
    "scalar": lambda m: {"a": np.zeros((m, 2), np.float32), "b": np.float32(1)},
    "uneven": lambda m: {"a": np.zeros((m, 2), np.float32), "b": np.zeros(m + 1, np.float32)},
    "whole": lambda m: np.zeros((m, 2), np.int32),
    "complex": lambda m: np.zeros((m, 2), np.complex64),
    "words": lambda m: {"a": "b"},
    "numbers": lambda m: [[0.0, 1.0]] * m,
}


def filled(cloud, values, seed):
    """The cloud with random values of a kind."""
    rng = np.random.default_rng(seed)
    scale = {"equal": 0.0, "tiny": 1e-20, "large": 1e4, "huge": 1e38}.get(values, 1.0)

    def fill(leaf):
        if not isinstance(leaf, np.ndarray):
            return leaf
        with np.errstate(all="ignore"):
            made = np.asarray(rng.normal(size=leaf.shape) * scale).astype(leaf.dtype)
        if made.size and values == "one nan":
            made.reshape(-1)[0] = np.nan if made.dtype.kind in "fcV" else 0
        return (
            made * leaf.dtype.type(np.nan) if values == "nan" and made.dtype.kind == "f" else made
        )

    return jax.tree.map(fill, cloud)


BATCHES = {
    "none": lambda: None,
    "full": lambda: DATA,
    "two": lambda: px.Minibatches(DATA, 2),
    "all": lambda: px.Minibatches(DATA, ROWS),
    "stream": lambda: px.Stream(DATA, 2),
    "ends": lambda: px.Stream(lambda step: iter([DATA[:2]] * 3), num_data=ROWS),
    "too many": lambda: px.Minibatches(DATA, ROWS + 1),
    "none of them": lambda: px.Minibatches(DATA, 0),
    "nan": lambda: px.Minibatches(np.full(ROWS, np.nan, np.float32), 2),
    "nan stream": lambda: px.Stream(np.full(ROWS, np.nan, np.float32), 2),
    "few": lambda: DATA[:3],
    "no rows": lambda: DATA[:0],
    "scalar": lambda: np.float32(1.0),
}


OPTIONS = {
    # option: (usual values, strange ones)
    "target": (
        ["bell", "bell", "data", "data", "cliff"] if LONG else ["bell", "data"],
        list(TARGETS),
    ),
    "sampler": (list(SAMPLERS) if LONG else ["sgld", "svgd adam"], list(SAMPLERS)),
    "number": ([0.05], [0.0, 1e9, -1.0, np.nan, np.inf, "a", None, "schedule", "falling"]),
    "cloud": (["matrix", "tree", "half", "hollow"] if LONG else ["half"], list(CLOUDS)),
    "num": ([4], [0, 1, 2]),
    "values": (["normal", "normal", "tiny", "equal", "large"], ["huge", "nan", "one nan"]),
    "data": ([None], list(BATCHES)),
    "steps": ([0, 1, 2, 5, 12], [-1, 2.5, True, None]),
    "thin": ([None], [1, 3, 0, 99, -1]),
    "observe_every": ([None, 2, 50], [0, 1.5]),
    "on_nonfinite": (["stop", "replace"], ["ignore"]),
    "every": ([None], [1, 3, "1h", 0, "soon", 1.5]),
    "saved": ([False, False, False, True], [True]),
}


FITTING = ["full", "two", "all", "stream"] if LONG else ["two", "stream"]


@st.composite
def cases(draw):
    """All usual, but for up to two options."""
    strange = draw(st.sets(st.sampled_from(list(OPTIONS)), max_size=2))
    case = {
        name: draw(st.sampled_from(rare if name in strange else usual))
        for name, (usual, rare) in OPTIONS.items()
    }
    if case["data"] is None:
        fitting = FITTING if case["target"] == "data" else ["none"]
        case["data"] = draw(st.sampled_from(fitting))
    return {**case, "seed": draw(st.integers(0, 10**6))}


@pytest.fixture(scope="module")
def scratch():
    with tempfile.TemporaryDirectory() as path:
        yield path


def outcome(case, scratch):
    """The result of a case; with a checkpoint, that of running it twice."""
    place = os.path.join(scratch, "run") if case["saved"] else None
    try:
        made = flow(case["target"], case["sampler"], case["number"])
        start = filled(CLOUDS[case["cloud"]](case["num"]), case["values"], case["seed"])
        work = lambda: px.run(
            made,
            start,
            steps=case["steps"],
            key=jax.random.key(case["seed"]),
            data=BATCHES[case["data"]](),
            thin=case["thin"],
            observers=lambda snapshot: False,
            observe_every=case["observe_every"],
            on_nonfinite=case["on_nonfinite"],
            every=case["every"],
            checkpoint=place,
            progress=False,
        )
        result = work()
        if case["saved"]:
            again = work()
            pairs = zip(jax.tree.leaves(result.state), jax.tree.leaves(again.state), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
        return start, result
    finally:
        if place:
            shutil.rmtree(place, ignore_errors=True)


FOUND = {"results": 0, "errors": 0, "trees": 0}
FORGET = 200
"""Cases after which compiled programs are forgotten: thousands of them exhaust the memory maps of a process, and XLA crashes."""


# A step of 1e9 is infinite in float16; NumPy says so while JAX traces, the run stops as it should.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@settings(QUIET, max_examples=LONG or 300)
@given(case=cases())
def test_every_run_ends_in_a_finite_result_or_a_documented_error(case, scratch, capsys):
    done = FOUND["results"] + FOUND["errors"]
    if LONG and done % FORGET == FORGET - 1:
        jax.clear_caches()
        print(f"\r{done + 1} cases", end="", file=sys.__stderr__, flush=True)
    try:
        start, result = outcome(case, scratch)
    except px.errors.ParticlaxError as error:
        assert len(str(error)) > 20
        FOUND["errors"] += 1
        return
    FOUND["results"] += 1
    assert int(result.state.step) == case["steps"]
    assert jax.tree.structure(result.particles) == jax.tree.structure(start)
    for got, began in zip(jax.tree.leaves(result.particles), jax.tree.leaves(start), strict=True):
        assert (got.shape, got.dtype) == (began.shape, began.dtype)
        assert np.isfinite(np.asarray(got, np.float32)).all()
    if case["steps"]:
        assert np.isfinite(result.log_density).all()
    for entry in result.replaced:
        assert entry.particle != entry.neighbour


def test_both_outcomes_are_met(record_property):
    """After the fuzzing: it is not all errors, nor all results."""
    results, errors = FOUND["results"], FOUND["errors"]
    if not results + errors:
        pytest.skip("the fuzzing was not run in this process")
    for name, count in FOUND.items():
        record_property(name, count)
    assert min(results, errors) > 0.1 * (results + errors)
