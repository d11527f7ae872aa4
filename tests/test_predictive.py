"""Predictions of clouds against NumPy double loops, known facts, and bad input."""

import functools
import importlib
import math
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import predictive, sweep
from particlax.errors import OptionError, ParticleError

COMPILE_FAST = True


def _without_hook():
    """A second copy of the package, without the type checks of conftest.py: what users get."""
    hooked = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "particlax"}
    for name in hooked:
        del sys.modules[name]
    plain = importlib.import_module("particlax.predictive")
    errors = importlib.import_module("particlax.errors")
    history = importlib.import_module("particlax.history").History
    engine = importlib.import_module("particlax.sweep")
    for name in [n for n in sys.modules if n.split(".")[0] == "particlax"]:
        del sys.modules[name]
    sys.modules.update(hooked)
    return plain, engine, errors, history


plain, engine, E, History = _without_hook()


# ------------------------------------------------------- references: float64 loops from the formulas


def ref_probs(logits):
    """softmax of each particle and row, [M, n, C]."""
    probs = np.zeros(logits.shape)
    for m, i in np.ndindex(logits.shape[:2]):
        shifted = [math.exp(z - max(logits[m, i])) for z in logits[m, i]]
        probs[m, i] = [e / sum(shifted) for e in shifted]
    return probs


def ref_mixture(probs):
    mixture = np.zeros(probs.shape[1:])
    for m, i, c in np.ndindex(probs.shape):
        mixture[i, c] += probs[m, i, c] / len(probs)
    return mixture


def ref_entropy(p):
    return -sum(q * math.log(q) for q in p if q > 0)


def ref_split(probs):
    """H[mean], mean H, and the mutual information as a mean of KL divergences."""
    mixture = ref_mixture(probs)
    total = np.array([ref_entropy(p) for p in mixture])
    data, model = np.zeros(len(mixture)), np.zeros(len(mixture))
    for m, i in np.ndindex(probs.shape[:2]):
        data[i] += ref_entropy(probs[m, i]) / len(probs)
        for p, q in zip(probs[m, i], mixture[i], strict=True):
            model[i] += p * math.log(p / q) / len(probs) if p > 0 else 0
    return total, data, model


def ref_reliability(mixture, y, bins):
    confidence, accuracy, count = np.zeros(bins), np.zeros(bins), np.zeros(bins, int)
    for p, label in zip(mixture, y, strict=True):
        for b in range(bins):
            if b / bins < max(p) <= (b + 1) / bins:
                count[b] += 1
                confidence[b] += max(p)
                accuracy[b] += np.argmax(p) == label
    for b in range(bins):
        confidence[b] = confidence[b] / count[b] if count[b] else np.nan
        accuracy[b] = accuracy[b] / count[b] if count[b] else np.nan
    return confidence, accuracy, count


def ref_scores(mixture, y, bins):
    right = density = brier = 0.0
    for p, label in zip(mixture, y, strict=True):
        right += np.argmax(p) == label
        density += math.log(p[label])
        brier += sum((p[c] - (c == label)) ** 2 for c in range(len(p)))
    confidence, accuracy, count = ref_reliability(mixture, y, bins)
    ece = sum(
        n / len(y) * abs(a - c)
        for c, a, n in zip(confidence, accuracy, count, strict=True)
        if n > 0
    )
    return right / len(y), density / len(y), brier / len(y), ece


def ref_auroc(inside, outside):
    won = 0.0
    for a in inside:
        for b in outside:
            won += 1.0 if b > a else 0.5 if b == a else 0.0
    return won / (len(inside) * len(outside))


def ref_tempered(mixture, t):
    power = np.array([[q ** (1 / t) for q in p] for p in mixture])
    return power / power.sum(1, keepdims=True)


def ref_temperature(mixture, y, sweeps=6):
    """The best of a grid over log T, refined around the best again and again."""
    low, high, rows = math.log(0.01), math.log(100), np.arange(len(y))
    for _ in range(sweeps):
        grid = np.linspace(low, high, 41)
        values = []
        for log_t in grid:
            log_p = np.log(mixture) / math.exp(log_t)
            log_p -= log_p.max(1, keepdims=True)
            values.append(np.mean(log_p[rows, y] - np.log(np.exp(log_p).sum(1))))
        best, step = grid[int(np.argmax(values))], grid[1] - grid[0]
        low, high = best - step, best + step
    return math.exp(best)


def ref_normal(means, sds, y):
    """Mean and sd of the mixture by output, log density by row, distribution function by output."""
    size, rows, outputs = means.shape
    mean, square, density, cdf = (
        np.zeros((rows, outputs)),
        np.zeros((rows, outputs)),
        np.zeros(rows),
        np.zeros((rows, outputs)),
    )
    for i in range(rows):
        mixed = 0.0
        for m in range(size):
            product = 1.0
            for k in range(outputs):
                mu, sd = means[m, i, k], sds[m, k]
                z = (y[i, k] - mu) / sd
                product *= math.exp(-0.5 * z * z) / (sd * math.sqrt(2 * math.pi))
                mean[i, k] += mu / size
                square[i, k] += (sd**2 + mu**2) / size
                cdf[i, k] += 0.5 * (1 + math.erf(z / math.sqrt(2))) / size
            mixed += product / size
        density[i] = math.log(mixed)
    return mean, np.sqrt(square - mean**2), density, cdf


# ------------------------------------------------------------------------------------------- the models


def linear(params, x):
    return x @ params["w"] + params["b"]


def layered(params, x):
    return jnp.tanh(x @ params["v"]) @ params["w"] + params["b"]


def given(logits, rows):
    """A 'network' whose parameters are its outputs: apply(p, i) = p[i]."""
    return logits[rows]


def cloud(rng, size=5, inputs=3, outputs=4, hidden=6, scale=2.0):
    draw = lambda *shape: jnp.asarray(scale * rng.normal(size=(size, *shape)))
    return {"v": draw(inputs, hidden), "w": draw(hidden, outputs), "b": draw(outputs)}


def ref_layered(particles, x):
    v, w, b = (np.asarray(particles[k], np.float64) for k in "vwb")
    x = np.asarray(x, np.float64)
    return np.stack([np.tanh(x @ v[m]) @ w[m] + b[m] for m in range(len(v))])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def predicted(logits, **options):
    """The prediction of a cloud whose logits are given, [M, n, C] (or [M, n, L, C])."""
    logits = jnp.asarray(logits)
    return predictive.categorical(given, logits, jnp.arange(logits.shape[1]), **options)


def some(rng, size=5, rows=40, classes=4, scale=2.0):
    logits = scale * rng.normal(size=(size, rows, classes))
    return logits.astype(np.float32).astype(np.float64), rng.integers(classes, size=rows)


# ------------------------------------------------------------------------------------------- the mixture

SIZES = [(5, 4), (1, 4), (5, 2), (1, 2), (30, 7)]


@pytest.mark.parametrize(("size", "classes"), SIZES)
def test_mixture_of_networks(rng, size, classes):
    particles, x = cloud(rng, size, outputs=classes), jnp.asarray(rng.normal(size=(17, 3)))
    pred = predictive.categorical(layered, particles, x)
    probs = ref_probs(ref_layered(particles, x))
    assert pred.log_probs.shape == (size, 17, classes)
    assert pred.log_probs.dtype == pred.log_mixture.dtype == np.float32
    assert isinstance(pred.log_probs, np.ndarray)
    np.testing.assert_allclose(np.exp(pred.log_probs), probs, rtol=2e-5)
    np.testing.assert_allclose(pred.probs, ref_mixture(probs), rtol=2e-5)
    np.testing.assert_allclose(pred.probs.sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(pred.labels, ref_mixture(probs).argmax(1))
    np.testing.assert_allclose(pred.confidence, ref_mixture(probs).max(1), rtol=2e-5)


@pytest.mark.parametrize(("size", "classes"), SIZES)
def test_scores(rng, size, classes):
    logits, y = some(rng, size, classes=classes)
    mixture = ref_mixture(ref_probs(logits))
    for bins in (1, 4, 15):
        expected = ref_scores(mixture, y, bins)
        found = predicted(logits).score(y, bins)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
        assert all(type(value) is float for value in found)
    np.testing.assert_allclose(
        predicted(logits).log_density(y),
        np.log(mixture[np.arange(len(y)), y]),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(("size", "classes"), SIZES)
def test_entropy_split(rng, size, classes):
    logits, _ = some(rng, size, classes=classes)
    total, data, model = ref_split(ref_probs(logits))
    found = predicted(logits).entropy()
    np.testing.assert_allclose(found.total, total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.data, data, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.model, model, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found.total, found.data + found.model)


@pytest.mark.parametrize("bins", [1, 2, 5, 15])
def test_reliability(rng, bins):
    logits, y = some(rng, classes=3)
    found = predicted(logits).reliability(y, bins)
    confidence, accuracy, count = ref_reliability(ref_mixture(ref_probs(logits)), y, bins)
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_allclose(found.confidence, confidence, rtol=1e-5)
    np.testing.assert_allclose(found.accuracy, accuracy, rtol=1e-12)
    assert found.count.sum() == len(y)
    assert found.ece == predicted(logits).score(y, bins).ece


def test_bins_are_closed_above():
    """Confidence 1 belongs to the last bin, and 1/2 to the first of two."""
    sure = predicted([[[1e4, 0.0], [0.0, 0.0]]]).reliability(np.array([0, 0]), 2)
    np.testing.assert_array_equal(sure.count, [1, 1])
    np.testing.assert_allclose(sure.confidence, [0.5, 1.0], rtol=1e-7)


def test_everything_in_float64(x64, rng):
    logits, y = some(rng)
    probs, pred = ref_probs(logits), predicted(logits)
    assert pred.log_probs.dtype == np.float64
    np.testing.assert_allclose(pred.score(y), ref_scores(ref_mixture(probs), y, 15), rtol=1e-12)
    np.testing.assert_allclose(pred.entropy(), ref_split(probs), rtol=1e-11, atol=1e-14)


def test_low_precision_logits_are_widened(rng):
    logits, _ = some(rng)
    low = jnp.asarray(logits, jnp.bfloat16)
    pred = predictive.categorical(given, low, jnp.arange(40))
    assert pred.log_probs.dtype == np.float32
    probs = ref_mixture(ref_probs(np.asarray(low, np.float64)))
    np.testing.assert_allclose(pred.probs, probs, rtol=1e-5)


# -------------------------------------------------------------------------- batches, places, snapshots


@pytest.mark.parametrize("batch_size", [1, 2, 7, 16, 17, 1000])
def test_batches_change_nothing(rng, batch_size):
    particles, x = cloud(rng), jnp.asarray(rng.normal(size=(17, 3)))
    y = rng.integers(4, size=17)
    whole = predictive.categorical(layered, particles, x, batch_size=17)
    parts = predictive.categorical(layered, particles, x, batch_size=batch_size)
    for name in ("log_mixture", "data_entropy", "model_entropy", "log_probs"):
        np.testing.assert_allclose(
            getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6, err_msg=name
        )
    density = predictive.log_density(layered, particles, x, y, batch_size=batch_size)
    np.testing.assert_allclose(density, whole.log_density(y), rtol=1e-5, atol=1e-6)
    means = lambda p, x: layered(p, x)[:, 0]
    one, many = (
        predictive.normal(means, particles, x, noise=1.0, batch_size=b) for b in (17, batch_size)
    )
    np.testing.assert_allclose(many.means, one.means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 16, 40])
def test_batches_change_no_bit_of_what_is_worked_out_row_by_row(rng, batch_size):
    logits, y = some(rng)
    whole, parts = predicted(logits), predicted(logits, batch_size=batch_size)
    np.testing.assert_array_equal(parts.log_probs, whole.log_probs)
    assert parts.score(y).accuracy == whole.score(y).accuracy


def test_one_compilation_for_all_batches(rng):
    traces = []

    def counting(p, x):
        traces.append(x.shape)
        return linear(p, x)

    particles = {"w": jnp.zeros((4, 3, 2)), "b": jnp.zeros((4, 2))}
    for _ in range(2):
        predictive.categorical(counting, particles, jnp.ones((17, 3)), batch_size=5)
    # Seen by eval_shape and by one compilation: 17 rows are batches of 5, 5, 5 and 2 (filled to 5).
    assert traces == [(5, 3)] * 2


def test_without_keep_only_the_particles_are_gone(rng):
    logits, y = some(rng)
    kept, lean = predicted(logits), predicted(logits, keep=False)
    assert lean.log_probs is None
    np.testing.assert_array_equal(lean.log_mixture, kept.log_mixture)
    np.testing.assert_array_equal(lean.entropy().model, kept.entropy().model)
    assert lean.score(y) == kept.score(y)


def test_labels_in_several_places(rng):
    """Logits [n, L, C] and labels [n, L]: as if all places were rows."""
    logits = 2 * rng.normal(size=(5, 8, 3, 4))
    y = rng.integers(4, size=(8, 3))
    pred, flat = predicted(logits, batch_size=3), predicted(logits.reshape(5, 24, 4))
    assert pred.log_probs.shape == (5, 8, 3, 4)
    assert pred.probs.shape == (8, 3, 4)
    assert pred.labels.shape == pred.entropy().total.shape == pred.log_density(y).shape == (8, 3)
    np.testing.assert_allclose(pred.score(y), flat.score(y.ravel()), rtol=1e-6)
    np.testing.assert_allclose(pred.reliability(y), flat.reliability(y.ravel()), rtol=1e-6)
    found = predictive.temperature(pred, y), predictive.temperature(flat, y.ravel())
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_log_density_of_labels_alone(rng):
    logits = 2 * rng.normal(size=(5, 8, 3, 50))
    y = rng.integers(50, size=(8, 3))
    for batch_size in (1, 3, 1000):
        found = predictive.log_density(
            given, jnp.asarray(logits), jnp.arange(8), y, batch_size=batch_size
        )
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, predicted(logits).log_density(y), rtol=1e-6)
    mixture = ref_mixture(ref_probs(logits.reshape(5, 24, 50)))
    perplexity = math.exp(-np.mean(np.log(mixture[np.arange(24), y.ravel()])))
    np.testing.assert_allclose(np.exp(-found.mean()), perplexity, rtol=1e-5)


def test_log_density_holds_the_logits_of_one_network():
    """30,000 classes and 8 particles: the networks take turns, and leave only the labels' values."""
    particles = {"e": jnp.linspace(-1, 1, 8)}
    apply = lambda p, x: p["e"] * jnp.cos(jnp.arange(30000.0)) + 0 * x[..., None]
    x, y = np.zeros((4, 128), np.float32), np.arange(4 * 128).reshape(4, 128)
    networks = sweep.Sweep(apply, particles, x, 1, logits=True)
    rows, labels = jnp.asarray(x[:1]), jnp.asarray(y[:1])
    compiled = sweep._batch.lower(apply, networks.cloud, rows, labels, logits=True)
    used = compiled.compile().compiled.memory_analysis().temp_size_in_bytes
    assert used < 3 * 128 * 30000 * 4
    assert networks.run(y)[0].shape == (1, 4, 128)


def test_x_may_be_a_pytree_and_on_the_host(rng, tmp_path):
    table = rng.normal(size=(10, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", table)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    particles = cloud(rng)
    tree = {"left": mapped[:, :1], "token": np.arange(10), "right": jnp.asarray(table[:, 1:])}
    apply = lambda p, r: (
        layered(p, jnp.concatenate([r["left"], r["right"]], 1)) + 0 * r["token"][:, None]
    )
    pred = predictive.categorical(apply, particles, tree, batch_size=4)
    plain_pred = predictive.categorical(layered, particles, jnp.asarray(table), batch_size=4)
    np.testing.assert_allclose(pred.log_probs, plain_pred.log_probs, rtol=1e-5, atol=1e-6)


class Net(eqx.Module):
    scale: jax.Array

    def __call__(self, params, x):
        return self.scale * linear(params, x)

    def double(self, params, x):
        return 2 * self(params, x)


class Unhashable:
    __hash__ = None  # type: ignore

    def __call__(self, params, x):
        return 3 * linear(params, x)


def test_apply_may_be_a_module_a_method_a_partial_or_have_no_hash(rng):
    particles = {k: v for k, v in cloud(rng, inputs=3, hidden=3).items() if k != "v"}
    x, net = jnp.asarray(rng.normal(size=(6, 3))), Net(jnp.array(3.0))
    logits = {
        factor: np.asarray(
            jax.nn.log_softmax(factor * jax.vmap(linear, (0, None))(particles, x), axis=-1)
        )
        for factor in (1, 3, 6)
    }
    cases = [(net, 3), (net.double, 6), (functools.partial(linear), 1), (Unhashable(), 3)]
    for apply, factor in cases:
        pred = predictive.categorical(apply, particles, x)
        np.testing.assert_allclose(pred.log_probs, logits[factor], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("carries", [True, False])
def test_snapshots_of_networks_that_carry(carries, key):
    """Each cloud predicts with what it carried then; a stateful network with nothing to carry does, too."""
    begin = lambda key: (jax.random.normal(key, (4, 3)), jnp.ones(()) if carries else ())
    apply = lambda p, x, carried: x @ p + (carried * x[:, :3] if carries else 0.0)
    forward = lambda p, x, carried, key: (x @ p, jax.tree.map(lambda leaf: leaf + 1, carried))
    net = px.networks.Network(begin, apply, forward, stateful=True)
    flow = px.svgd(px.networks.classifier(net, num_data=6), step_size=0.1)
    x, y = jax.random.normal(key, (6, 4)), jnp.array([0, 1, 2, 0, 1, 2])
    start = flow.init(*net.init(key, 2))
    run = px.run(flow, start, steps=6, key=key, data={"x": x, "y": y}, thin=2, progress=False)
    found = px.predictive.categorical(net, run.history, x)
    if carries:
        np.testing.assert_array_equal(run.history.carried[:, 0], [3, 5, 7])
    clouds = zip(run.history.particles, run.history.carried if carries else [(), (), ()], strict=True)  # fmt: skip
    want = [jax.nn.log_softmax(apply(p[m], x, c[m] if carries else ())) for p, c in clouds for m in (0, 1)]  # fmt: skip
    np.testing.assert_allclose(found.log_probs, np.stack(want), atol=1e-5)
    last = px.predictive.categorical(net, run.history.last(1), x)
    np.testing.assert_array_equal(last.log_probs, px.predictive.categorical(net, run, x).log_probs)
    with pytest.raises(OptionError, match="result or its history"):
        px.predictive.categorical(net, run.particles, x)


INDICES = {
    "mask": lambda n: np.arange(n) % 3 == 0,
    "mask on the device": lambda n: jnp.arange(n) % 3 == 0,
    "slice": lambda n: slice(2, n, 4),
    "row numbers": lambda n: [5, 1, 1],
    "one row": lambda n: 4,
}


@pytest.mark.parametrize("name", INDICES)
def test_some_of_the_predictions_are_those_of_some_rows(rng, name):
    cloud = rng.normal(size=(4, 3, 5))
    x, y = rng.normal(size=(20, 3)), rng.integers(0, 5, 20)
    index = INDICES[name](20)
    rows = np.atleast_1d(
        np.arange(20)[np.asarray(index) if name == "mask on the device" else index]
    )
    apply = lambda w, x: x @ w
    some, alone = (
        predictive.categorical(apply, cloud, x)[index],
        predictive.categorical(apply, cloud, x[rows]),
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), some, alone)
    np.testing.assert_allclose(some.score(y[rows]), alone.score(y[rows]), rtol=1e-5)
    noise = lambda w: jnp.exp(w[0, 0])
    values, told = (predictive.normal(apply, cloud, part, noise=noise) for part in (x, x[rows]))
    np.testing.assert_allclose(
        values[index].score(x[rows] @ cloud[0]), told.score(x[rows] @ cloud[0]), rtol=1e-4
    )


def test_masked_labels_of_sequences_do_not_count(rng):
    logits, y = rng.normal(size=(3, 6, 4, 5)), rng.integers(-1, 5, (6, 4))
    pred = predictive.categorical(lambda p, x: p[x], logits, np.arange(6))
    mask = y >= 0
    chosen = np.take_along_axis(pred.log_mixture, np.maximum(y, 0)[..., None], -1)[..., 0]
    score = pred[mask].score(y[mask])
    assert score.log_density == pytest.approx(chosen[mask].mean())
    assert score.accuracy == pytest.approx(np.mean(pred.labels[mask] == y[mask]))
    assert pred[mask].log_probs.shape == (3, mask.sum(), 5)
    assert pred[2:4, 1].log_mixture.shape == (2, 1, 5)
    assert (
        predictive.categorical(lambda p, x: p[x], logits, np.arange(6), keep=False)[mask].log_probs
        is None
    )


@pytest.mark.parametrize(
    "index, words",
    [
        (np.ones(7, bool), "of shape [6, 4] have no such part"),
        ((0, 0, 0), "too many indices"),
        (..., "a mask of that shape or of its first axis"),
        (None, "numbers of rows"),
        (9, "out of bounds"),
        (np.zeros(6, bool), "none of the predictions of shape [6, 4] is selected"),
    ],
)
def test_parts_that_are_not_there(rng, index, words):
    pred = predictive.categorical(lambda p, x: p[x], rng.normal(size=(3, 6, 4, 5)), np.arange(6))
    with pytest.raises(px.errors.DataError) as caught:
        pred[index]
    assert words in str(caught.value)


def test_no_particles():
    with pytest.raises(ParticleError, match=r"no particles came.*thin=100"):
        px.predictive.categorical(lambda w, x: x @ w, None, jnp.ones((2, 3)))


def test_snapshots_are_networks_too(rng, key):
    """[T, M, ...] is flattened with time first; a run's history and its last clouds."""
    flow = px.sgld(
        px.Target(lambda p: -0.5 * sum(jnp.sum(v**2) for v in p.values())), step_size=0.1
    )
    start = {"w": jnp.zeros((4, 3, 2)), "b": jnp.zeros((4, 2))}
    history = px.run(flow, start, steps=60, key=key, thin=10, progress=False).history
    x, y = jnp.asarray(rng.normal(size=(9, 3))), rng.integers(2, size=9)
    pooled = predictive.snapshots(history)
    assert pooled["w"].shape == (24, 3, 2)
    np.testing.assert_array_equal(pooled["b"][4 * 2 + 3], history.particles["b"][2, 3])
    pred = predictive.categorical(linear, pooled, x)
    times = [
        predictive.categorical(linear, jax.tree.map(lambda a, t=t: a[t], history.particles), x)
        for t in range(6)
    ]
    np.testing.assert_allclose(pred.probs, np.mean([p.probs for p in times], 0), rtol=1e-5)
    np.testing.assert_array_equal(
        predictive.categorical(linear, history, x).log_mixture, pred.log_mixture
    )
    np.testing.assert_array_equal(
        predictive.log_density(linear, history, x, y), predictive.log_density(linear, pooled, x, y)
    )
    last = predictive.categorical(linear, predictive.snapshots(history, last=2), x)
    np.testing.assert_allclose(last.probs, np.mean([p.probs for p in times[-2:]], 0), rtol=1e-5)
    np.testing.assert_array_equal(predictive.snapshots(history.particles, last=6)["w"], pooled["w"])


# ------------------------------------------------------------------------------------------ known facts


def test_agreement_has_no_model_entropy(rng):
    """Equal particles: nothing to learn about the parameters, to far below the rounding of H."""
    logits, _ = some(rng, size=1, scale=4.0)
    entropy = predicted(np.repeat(logits, 7, 0)).entropy()
    assert entropy.model.min() >= 0
    assert entropy.model.max() < 1e-11
    assert predicted(logits).entropy().model.max() < 1e-11


def test_small_disagreement_is_resolved(rng):
    """Differences of 1e-4 in the logits make a mutual information of 1e-9, below the rounding of H."""
    base, _ = some(rng, size=1)
    off = 1e-4 * rng.normal(size=(6, 40, 4))
    logits = (base + off).astype(np.float32).astype(np.float64)
    found, model = predicted(logits).entropy().model, ref_split(ref_probs(logits))[2]
    assert 1e-11 < np.median(model) < 1e-8
    np.testing.assert_allclose(found, model, rtol=0.05, atol=1e-11)


def test_certain_and_opposed_particles():
    """Each is sure, and they disagree: all of log 2 is the model's."""
    entropy = predicted([[[1e4, -1e4]], [[-1e4, 1e4]]]).entropy()
    np.testing.assert_allclose(entropy.total, math.log(2), rtol=1e-6)
    np.testing.assert_array_equal(entropy.data, 0)


def test_uniform_predictions():
    pred = predicted(np.zeros((3, 8, 4)))
    entropy = pred.entropy()
    np.testing.assert_allclose(entropy.data, math.log(4), rtol=1e-6)
    assert entropy.model.max() < 1e-12
    scores = pred.score(np.arange(8) % 4)
    np.testing.assert_allclose(scores.log_density, -math.log(4), rtol=1e-6)
    np.testing.assert_allclose(scores.brier, 0.75, rtol=1e-6)
    np.testing.assert_allclose([scores.accuracy, scores.ece], [0.25, 0], atol=1e-6)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_logits(size):
    """Right and sure, wrong and sure; log densities stay finite where probabilities are 0."""
    logits = np.array([[[size, -size, 0.0]], [[size, -size, 0.0]]])
    pred = predicted(logits)
    right, wrong = pred.score(np.array([0])), pred.score(np.array([1]))
    assert right == (1.0, 0.0, 0.0, 0.0)
    assert (wrong.accuracy, wrong.brier, wrong.ece) == (0.0, 2.0, 1.0)
    np.testing.assert_allclose(wrong.log_density, -2 * size, rtol=1e-6)
    assert all(np.array_equal(part, [0]) for part in pred.entropy())
    assert predictive.temperature(pred, np.array([0])) == 0.01
    assert predictive.temperature(pred, np.array([1])) == 100.0
    assert np.isfinite(pred.tempered(1e3).log_mixture).all()


def test_masked_classes():
    """A logit of -inf is a class that cannot be: probability 0, and no NaN anywhere."""
    logits = np.array([[[0.0, 0.0, -np.inf]], [[1.0, -np.inf, -np.inf]]])
    pred = predictive.categorical(
        lambda p, x: jnp.log(jnp.exp(p) - 1)[x] if p.ndim == 2 else p,
        jnp.asarray(np.log1p(np.exp(logits))),
        jnp.arange(1),
    )
    np.testing.assert_allclose(pred.probs, [[0.75, 0.25, 0]], rtol=1e-6)
    np.testing.assert_allclose(
        np.array(pred.entropy())[:, 0], np.array(ref_split(ref_probs(logits)))[:, 0], rtol=1e-5
    )
    assert pred.score(np.array([2])).log_density == -np.inf
    np.testing.assert_allclose(pred.score(np.array([0])).brier, 2 * 0.25**2, rtol=1e-6)
    assert predictive.temperature(pred, np.array([2])) == 100.0
    hot = pred.tempered(1e6)
    np.testing.assert_allclose(hot.probs, [[0.5, 0.5, 0]], rtol=1e-5)
    np.testing.assert_allclose(hot.entropy().total, math.log(2), rtol=1e-5)


# ------------------------------------------------------------------------------------------ temperature


@pytest.mark.parametrize("t", [0.3, 1.0, 2.5])
def test_tempered(rng, t):
    logits, y = some(rng)
    mixture = ref_mixture(ref_probs(logits))
    pred, wanted = predicted(logits).tempered(t), ref_tempered(mixture, t)
    np.testing.assert_allclose(pred.probs, wanted, rtol=1e-5)
    np.testing.assert_allclose(pred.score(y), ref_scores(wanted, y, 15), rtol=1e-5)
    np.testing.assert_allclose(
        pred.entropy().total, [ref_entropy(p) for p in wanted], rtol=1e-5, atol=1e-7
    )
    assert pred.log_probs is None
    np.testing.assert_array_equal(pred.entropy().model, 0)
    twice = pred.tempered(2.0)
    np.testing.assert_allclose(twice.probs, ref_tempered(mixture, 2 * t), rtol=1e-5)


@pytest.mark.parametrize(("size", "classes"), SIZES)
@pytest.mark.parametrize("scale", [0.2, 1.0, 6.0])
def test_temperature_is_the_best_of_a_grid(rng, size, classes, scale):
    logits, _ = some(rng, size, classes=classes, rows=60)
    mixture = ref_mixture(ref_probs(scale * logits))
    y = np.array([rng.choice(classes, p=p) for p in ref_mixture(ref_probs(logits))])
    found = predictive.temperature(predicted(scale * logits), y)
    assert type(found) is float
    np.testing.assert_allclose(found, ref_temperature(mixture, y), rtol=1e-4)


@pytest.mark.parametrize("t", [0.25, 1.0, 4.0])
def test_temperature_of_overconfident_predictions_is_recovered(rng, t):
    """Labels drawn from softmax(z), predictions softmax(T z): the temperature is T."""
    logits = rng.normal(size=(20000, 5))
    uniform = rng.gumbel(size=logits.shape)
    y = np.argmax(logits + uniform, 1)
    pred = predicted(t * logits[None])
    found = predictive.temperature(pred, y)
    np.testing.assert_allclose(found, t, rtol=0.05)
    before, after = pred.score(y), pred.tempered(found).score(y)
    assert after.log_density >= before.log_density
    assert after.ece < 0.02
    if t != 1:
        assert before.ece > 0.05
    assert after.accuracy == before.accuracy


def test_temperature_without_a_maximum(rng):
    logits, _ = some(rng)
    pred = predicted(logits)
    assert predictive.temperature(pred, pred.labels) == 0.01
    assert predictive.temperature(pred, pred.log_mixture.argmin(1)) == 100.0


# ------------------------------------------------------------------------------------------------ AUROC


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("inside", "outside"), [(1, 1), (30, 20), (7, 50)])
def test_auroc_is_the_share_of_pairs(rng, inside, outside, ties):
    a, b = rng.normal(size=inside), 0.5 + rng.normal(size=outside)
    if ties:
        a, b = np.round(a), np.round(b)
    np.testing.assert_allclose(predictive.auroc(a, b), ref_auroc(a, b), rtol=1e-14)
    np.testing.assert_allclose(predictive.auroc(b, a), 1 - ref_auroc(a, b), rtol=1e-12)


def test_auroc_facts(rng):
    same = rng.normal(size=500)
    assert predictive.auroc(same, same) == 0.5
    assert predictive.auroc(np.zeros(3), np.zeros(5)) == 0.5
    assert predictive.auroc(np.arange(3.0), np.arange(3.0, 7.0)) == 1.0
    assert predictive.auroc(np.arange(3.0, 7.0), np.arange(3.0)) == 0.0
    assert predictive.auroc(jnp.array([[0.0, -np.inf]]), jnp.array([np.inf])) == 1.0
    a, b = rng.normal(size=(2, 200000))
    np.testing.assert_allclose(predictive.auroc(a, b), 0.5, atol=0.005)
    phi = 0.5 * (1 + math.erf(1 / 2))  # P(N(1, 1) > N(0, 1)) = Phi(1 / sqrt(2))
    np.testing.assert_allclose(predictive.auroc(a, b + 1), phi, atol=0.005)


def test_disagreement_finds_inputs_of_another_kind(rng):
    """Lines fitted near the origin disagree far from it: the model part tells, and beats a coin."""
    w = jnp.asarray([[1.0, -1.0]] + 0.3 * rng.normal(size=(20, 1, 2)))
    apply = lambda p, x: x @ p
    near, far = rng.normal(size=(200, 1)), 0.2 * rng.normal(size=(200, 1)) + 3
    near, far = (predictive.categorical(apply, w, jnp.asarray(x)) for x in (near, far))
    assert predictive.auroc(1 - near.confidence, 1 - far.confidence) < 0.3
    w = jnp.asarray(3 * rng.normal(size=(20, 1, 2)))  # nothing was learnt: they disagree
    near = predictive.categorical(apply, w, jnp.asarray(0.1 * rng.normal(size=(200, 1))))
    far = predictive.categorical(apply, w, jnp.asarray(3 + 0.1 * rng.normal(size=(200, 1))))
    assert predictive.auroc(near.entropy().model, far.entropy().model) > 0.95
    assert predictive.auroc(near.entropy().data, far.entropy().data) < 0.05


# ------------------------------------------------------------------------------------------- regression


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize(
    ("outputs", "noise"),
    [(None, "number"), (None, "scalar")]
    + [(num, noise) for num in (1, 3) for noise in ("number", "scalar", "vector")],
)
def test_normal_mixture(rng, size, outputs, noise):
    num = outputs or 1
    particles = cloud(rng, size, outputs=num, scale=0.7)
    particles["log_sd"] = jnp.asarray(0.3 * rng.normal(size=(size, num)))
    x, y = jnp.asarray(rng.normal(size=(12, 3))), rng.normal(size=(12, num))
    apply = layered if outputs else lambda p, x: layered(p, x)[:, 0]
    sd = {
        "number": 0.7,
        "scalar": lambda p: jnp.exp(p["log_sd"][0]),
        "vector": lambda p: jnp.exp(p["log_sd"]),
    }[noise]
    pred = predictive.normal(apply, particles, x, noise=sd, batch_size=5)
    sds = np.exp(np.asarray(particles["log_sd"], np.float64))
    sds = {"number": np.full_like(sds, 0.7), "scalar": 0 * sds + sds[:, :1], "vector": sds}[noise]
    mean, spread, density, cdf = ref_normal(ref_layered(particles, x), sds, y)
    if outputs is None:
        mean, spread, cdf, y = mean[:, 0], spread[:, 0], cdf[:, 0], y[:, 0]
    assert pred.means.shape == (size, *y.shape)
    np.testing.assert_allclose(pred.mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pred.sd, spread, rtol=1e-5)
    np.testing.assert_allclose(pred.log_density(y), density, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pred.cdf(y), cdf, rtol=1e-4, atol=1e-6)
    found = pred.score(y)
    inside = np.mean([0.05 <= value <= 0.95 for value in cdf.ravel()])
    rmse = math.sqrt(np.mean((y - mean) ** 2))
    np.testing.assert_allclose(found, [rmse, density.mean(), inside], rtol=1e-5)
    assert all(type(value) is float for value in found)


def test_coverage_and_density_where_the_model_is_right(rng):
    """y drawn from the mixture: coverage 90 %, the distribution function uniform."""
    means = rng.normal(size=(20, 4000))
    y = means[rng.integers(20, size=4000), np.arange(4000)] + 0.3 * rng.normal(size=4000)
    pred = predictive.normal(given, jnp.asarray(means), jnp.arange(4000), noise=0.3)
    assert abs(pred.score(y).coverage - 0.9) < 0.02
    assert np.abs(np.sort(pred.cdf(y)) - np.arange(4000) / 4000).max() < 0.03
    narrow = predictive.normal(given, jnp.asarray(means[:1]), jnp.arange(4000), noise=0.3)
    assert narrow.score(y).coverage < 0.6
    assert narrow.score(y).log_density < pred.score(y).log_density


def test_normal_density_far_out_is_finite():
    pred = predictive.normal(given, jnp.array([[0.0], [1.0]]), jnp.arange(1), noise=1e-3)
    expected = -0.5 * 1e12 - math.log(2e-3) - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(pred.log_density(np.array([1001.0])), expected, rtol=1e-7)


def test_one_particle_is_one_normal(rng):
    pred = predictive.normal(given, jnp.zeros((1, 5)), jnp.arange(5), noise=2.0)
    np.testing.assert_allclose(pred.sd, 2.0)
    np.testing.assert_allclose(
        pred.log_density(np.zeros(5)), -math.log(2) - 0.5 * math.log(2 * math.pi)
    )


# -------------------------------------------------------------------------------------------- bad input

X = jnp.ones((6, 3))
CLOUD = {"w": jnp.ones((4, 3, 2)), "b": jnp.zeros((4, 2))}


def refused(kind, *words):
    """A context that wants the class and every word."""
    pattern = "".join(f"(?=[\\s\\S]*{word})" for word in words)
    return pytest.raises(kind, match=pattern)


@pytest.fixture(scope="module")
def pred():
    return plain.categorical(linear, CLOUD, X)


BAD_LABELS = {
    "too large": (np.array([0, 1, 2, 0, 1, 0]), ["from 0 to 2", "from 0 to 1", "from 0"]),
    "negative": (np.array([0, 1, -100, 0, 1, 0]), ["from -100 to 1", "from 0 to 1"]),
    "floats": (np.zeros(6), ["float64", "whole numbers", r"astype\(int\)"]),
    "one-hot": (np.eye(2, dtype=int)[[0, 1, 0, 1, 0, 1]], [r"\[6, 2\]", r"\[6\]", "argmax"]),
    "short": (np.zeros(5, int), [r"\[5\]", r"\[6\]"]),
    "column": (np.zeros((6, 1), int), [r"\[6, 1\]", r"\[6\]"]),
    "none": (np.zeros(0, int), [r"\[0\]", r"\[6\]"]),
    "words": (np.array(list("abcdef")), ["whole numbers"]),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_bad_labels(pred, name):
    y, words = BAD_LABELS[name]
    for call in (pred.score, pred.log_density, pred.reliability):
        with refused(E.DataError, *words):
            call(y)
    with refused(E.DataError, *words):
        plain.temperature(pred, y)
    with refused(E.DataError, *words):
        plain.log_density(linear, CLOUD, X, y)


@pytest.mark.parametrize("y", [[0, 1, 0, 1, 0, 1], np.array([0, 1, 0, 1, 0, 1], bool)])
def test_lists_and_booleans_are_labels(pred, y):
    assert pred.score(y) == pred.score(np.array(y, np.uint8))


BAD_LOGITS = {
    "no classes": (lambda p, x: x @ p["w"][:, 0], [r"\(6,\)", "n = 6", r"\[n, C\]", r"jnp\.stack"]),
    "one class": (lambda p, x: x @ p["w"][:, :1], [r"\(6, 1\)", "C > 1", r"jnp\.stack"]),
    "one row": (lambda p, x: x[0] @ p["w"], [r"\(2,\)", "n = 6"]),
    "transposed": (lambda p, x: linear(p, x).T, [r"\(2, 6\)", "n = 6"]),
    "summed": (lambda p, x: jnp.sum(linear(p, x)), [r"\(\)"]),
    "a pair": (lambda p, x: (linear(p, x), 0), ["expected real logits"]),
    "labels": (lambda p, x: linear(p, x).astype(int), ["int32"]),
    "nothing": (lambda p, x: None, ["apply returned None"]),
}


@pytest.mark.parametrize("name", BAD_LOGITS)
def test_logits_of_the_wrong_shape(monkeypatch, name):
    monkeypatch.setattr(engine, "_batch", None)  # nothing may be compiled
    apply, words = BAD_LOGITS[name]
    for call in (plain.categorical, functools.partial(plain.log_density, y=np.zeros(6, int))):
        with refused(E.TargetError, *words):
            call(apply, CLOUD, X)


@pytest.mark.parametrize(
    "apply", [lambda p, x: linear(p, x)[None], lambda p, x: linear(p, x)[0], lambda p, x: 0]
)
def test_means_of_the_wrong_shape(monkeypatch, apply):
    monkeypatch.setattr(engine, "_batch", None)
    with refused(E.TargetError, "n = 6", r"means \[n\] or \[n, \.\.\., K\]"):
        plain.normal(apply, CLOUD, X, noise=1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_x_that_is_not_finite(monkeypatch, value, kind):
    monkeypatch.setattr(engine, "_batch", None)
    x = np.ones((6, 3), np.float32)
    x[4, 1] = value
    with refused(E.DataError, "row 4 of x ", "not finite"):
        plain.categorical(linear, CLOUD, kind(x))
    with refused(E.DataError, r"row 4 of x\['a'\] ", "not finite"):
        plain.normal(lambda p, x: linear(p, x["a"]), CLOUD, {"a": kind(x)}, noise=1.0)


def test_particles_that_are_not_finite():
    with refused(E.ParticleError, r"row 2 of particles\['b'\] "):
        plain.categorical(linear, {**CLOUD, "b": CLOUD["b"].at[2, 1].set(jnp.nan)}, X)


@pytest.mark.parametrize("x", [jnp.ones((0, 3)), None, {}, {"a": jnp.ones((0, 3))}])
def test_no_rows(x):
    with refused(E.DataError, "empty", "at least one"):
        plain.categorical(linear, CLOUD, x)


def test_rows_that_differ_in_number():
    with refused(E.DataError, "different leading sizes"):
        plain.categorical(linear, CLOUD, {"a": jnp.ones((3, 2)), "b": jnp.ones((4, 2))})


def test_outputs_that_are_not_finite_name_particle_and_row():
    particles = {**CLOUD, "b": CLOUD["b"].at[2].set(5.0)}
    x = X.at[4].set(7.0)
    bad = lambda value: (
        lambda p, x: linear(p, x) + jnp.where((p["b"][0] > 1) & (x[:, :1] > 5), value, 0)
    )
    for value in (jnp.nan, jnp.inf):
        with refused(E.TargetError, "particle 2", "row 4", "NaN or infinity"):
            plain.categorical(bad(value), particles, x, batch_size=4)  # 3 and 3
        with refused(E.TargetError, "particle 2", "row 4"):
            plain.log_density(bad(value), particles, x, np.zeros(6, int), batch_size=6)
    for value in (jnp.nan, jnp.inf, -jnp.inf):
        with refused(E.TargetError, "particle 2", "row 4"):
            plain.normal(bad(value), particles, x, noise=1.0)


def test_particles_that_are_no_cloud():
    with refused(E.ParticleError, "same number of particles"):
        plain.categorical(linear, {"w": jnp.ones((4, 3, 2)), "b": jnp.zeros((3, 2))}, X)
    with refused(E.ParticleError, "empty pytree"):
        plain.categorical(linear, {}, X)


@pytest.mark.parametrize("noise", [0.0, -1.0, np.nan, np.inf, "a", None, True])
def test_bad_noise(noise):
    with refused(E.OptionError, "noise", "expected a"):
        plain.normal(linear, CLOUD, X, noise=noise)


@pytest.mark.parametrize(
    "noise",
    [
        lambda p: -jnp.sum(p["w"]),
        lambda p: p["b"][0],
        lambda p: p["w"],
        lambda p: p["b"][:1] + 1,
        lambda p: jnp.nan * p["b"][0],
    ],
)
def test_bad_learned_noise(monkeypatch, noise):
    monkeypatch.setattr(engine, "_batch", None)
    with refused(E.TargetError, "noise returned", "positive sd"):
        plain.normal(linear, CLOUD, X, noise=noise)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda a: np.asarray(a).tolist()])
def test_numbers_with_a_noise_of_each_row(kind):
    """Arrays of one's own, against loops: sd, log density, distribution."""
    rng = np.random.default_rng(3)
    means, sds = rng.normal(size=(4, 9)), rng.uniform(0.3, 2, (4, 9))
    y = rng.normal(size=9)
    pred = plain.Normal(kind(means), kind(sds))
    some = 1e-5 if kind is jnp.asarray else 1e-12
    var = (sds**2).mean(0) + means.var(0)
    np.testing.assert_allclose(pred.sd, np.sqrt(var), rtol=some)
    each = np.exp(-0.5 * ((y - means) / sds) ** 2) / np.sqrt(2 * np.pi * sds**2)
    np.testing.assert_allclose(pred.log_density(y), np.log(each.mean(0)), rtol=some, atol=some)
    row = plain.Normal(kind(means), kind(sds[:1]))
    np.testing.assert_allclose(row.sd, np.sqrt(sds[0] ** 2 + means.var(0)), rtol=some)


@pytest.mark.parametrize("tail", [(), (2,), (4, 2)])
def test_a_noise_that_the_network_returns(tail):
    """In batches, as the mixture of its arrays; stateful networks and histories through the same door."""
    rng = np.random.default_rng(5)
    cloud, x, y = rng.normal(size=3), rng.normal(size=(7, *tail)), rng.normal(size=(7, *tail))
    both = lambda w, x: (w * x, jnp.exp(0.3 * w * x))
    pred = plain.normal(both, cloud, x, noise="network", batch_size=3)
    means = cloud.reshape(3, *[1] * x.ndim) * x
    sds = np.exp(0.3 * means)
    each = -0.5 * ((y - means) / sds) ** 2 - np.log(sds) - 0.5 * np.log(2 * np.pi)
    truth = np.log(np.exp(each.reshape(3, 7, -1).sum(-1)).mean(0))
    np.testing.assert_allclose(pred.log_density(y), truth, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pred.sd, np.sqrt((sds**2).mean(0) + means.var(0)), rtol=1e-5)


@pytest.mark.parametrize(
    ("apply", "noise", "words"),
    [
        (lambda w, x: w * x, "network", "expected the pair"),
        (lambda w, x: (w * x, w + 0 * x), "network", "sds down to -1.0; expected sds > 0"),
        (lambda w, x: (w * x, jnp.log(w) + 0 * x), "network", "NaN or infinity for particle 1 and row 0"),
        (lambda w, x: (w * x, jnp.exp(x)), 1.0, "or with noise='network' a pair"),
        (lambda w, x: w * x, lambda w: jnp.ones(12), "apply returns the pair .*noise='network'"),
    ],
)  # fmt: skip
def test_pairs_that_do_not_fit(apply, noise, words):
    with refused(E.TargetError, words):
        plain.normal(apply, jnp.array([1.0, -1.0]), jnp.linspace(0, 1, 9), noise=noise)


@pytest.mark.parametrize(
    ("means", "sds", "words"),
    [
        (
            np.zeros((4, 9)),
            np.ones(9),
            r"sds have shape \(9,\) for means of shape \(4, 9\).*sds\[None\]",
        ),
        (np.zeros((4, 9)), np.ones(4), r"sds\[:, None\] for one of each particle"),
        (np.zeros((4, 9)), 1.0, r"sds have shape \(\)"),
        (np.zeros((4, 9)), np.ones((4, 3)), r"sds have shape \(4, 3\)"),
        (np.zeros((4, 9, 2)), np.ones((4, 9)), r"sds have shape \(4, 9\)"),
        (np.zeros(9), np.ones(9), r"expected means \[M, n\]"),
        (np.zeros((4, 9)), -np.ones((4, 9)), "sds reach down to -1.0; expected numbers > 0"),
        (np.zeros((4, 9)), np.zeros((4, 9)), "sds reach down to 0.0; expected numbers > 0"),
        (np.full((4, 9), np.nan), np.ones((4, 9)), "row 0 of means is not finite"),
        (np.zeros((4, 9)), np.full((4, 9), np.inf), "row 0 of sds is not finite"),
    ],
)
def test_numbers_that_do_not_fit(means, sds, words):
    with refused(E.DataError, words):
        plain.Normal(means, sds)


def test_sequences_of_numbers():
    """What a regressor trains, [n, L, K], it predicts: a row's log density is the sum over all of its outputs."""
    rng = np.random.default_rng(4)
    cloud, x, y = rng.normal(size=3), rng.normal(size=(5, 4, 2)), rng.normal(size=(5, 4, 2))
    pred = plain.normal(lambda w, x: w * x, cloud, x, noise=0.7)
    each = -0.5 * ((y - cloud[:, None, None, None] * x) / 0.7) ** 2 - 0.5 * np.log(2 * np.pi * 0.49)
    truth = np.log(np.exp(each.sum((2, 3))).mean(0))
    np.testing.assert_allclose(pred.log_density(y), truth, rtol=1e-5)


@pytest.mark.parametrize("words", [np.array(["a", "b"]), np.array([None, 1], object)])
def test_inputs_that_are_words(words):
    with refused(E.DataError, "has dtype .*; expected numbers"):
        plain.normal(lambda w, x: w * x, jnp.ones(2), words, noise=1.0)


def test_inputs_with_random_keys(key):
    x = {"a": jnp.ones((4, 2)), "keys": jax.random.split(key, 4)}
    pred = plain.normal(lambda w, x: x["a"] @ w, jnp.ones((3, 2)), x, noise=1.0)
    np.testing.assert_array_equal(pred.mean, 2.0)


def test_what_an_observer_sees_predicts(key):
    seen, x = [], np.ones((3, 2), np.float32)
    target = px.Target(lambda w: -jnp.sum(w**2))
    px.run(px.svgd(target, step_size=0.1), jax.random.normal(key, (4, 2)), steps=2, key=key, progress=False, observers=[seen.append])  # fmt: skip
    apply = lambda w, x: x @ w
    found = px.predictive.normal(apply, seen[-1], x, noise=1.0)
    wanted = px.predictive.normal(apply, seen[-1].state.particles, x, noise=1.0)
    np.testing.assert_array_equal(found.means, wanted.means)
    with pytest.raises(ParticleError, match="a flow came in place of particles"):
        px.predictive.normal(apply, px.svgd(target, step_size=0.1), x, noise=1.0)


def test_more_clouds_than_a_history_has(key):
    target = px.Target(lambda w: -jnp.sum(w**2))
    flow = px.svgd(target, step_size=0.1)
    result = px.run(flow, jax.random.normal(key, (4, 2)), steps=4, key=key, thin=2, progress=False)
    with pytest.raises(
        OptionError, match=r"last\(3\) of a history of 2 clouds; expected at most 2"
    ):
        result.history.last(3)


@pytest.mark.parametrize("y", [np.zeros(6), np.zeros((6, 1)), np.zeros((5, 2))])
def test_values_of_the_wrong_shape(y):
    pred = plain.normal(linear, CLOUD, X, noise=1.0)
    with refused(E.DataError, r"expected \(6, 2\)"):
        pred.score(y)


def test_values_that_are_not_finite():
    y = np.zeros((6, 2))
    y[3, 1] = np.nan
    with refused(E.DataError, "row 3 of y "):
        plain.normal(linear, CLOUD, X, noise=1.0).score(y)


@pytest.mark.parametrize("value", [0, -1, 2.5, "a", True])
def test_bad_options(pred, value):
    with refused(E.OptionError, "batch_size is"):
        plain.categorical(linear, CLOUD, X, batch_size=value)
    with refused(E.OptionError, "bins is"):
        pred.score(np.zeros(6, int), bins=value)
    with refused(E.OptionError, "last is"):
        plain.snapshots({"w": jnp.zeros((3, 4, 2))}, last=value)


def test_unknown_option():
    with refused(E.OptionError, "no option 'batchsize'", "did you mean 'batch_size'"):
        plain.categorical(linear, CLOUD, X, batchsize=3)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, "a", lambda step: 1.0])
def test_bad_temperature(pred, value):
    with refused(E.OptionError, "temperature is"):
        pred.tempered(value)


def test_temperature_wants_a_prediction():
    with refused(E.OptionError, "pred is", "Categorical"):
        plain.temperature(np.zeros((3, 2)), np.zeros(3, int))


@pytest.mark.parametrize(
    ("inside", "outside", "name"),
    [([], [1.0], "inside"), ([1.0], [], "outside"), ([1.0, np.nan, 2.0], [1.0], "inside")],
)
def test_bad_scores(inside, outside, name):
    with refused(E.DataError, f"{name} is empty or has NaN"):
        plain.auroc(inside, outside)


@pytest.mark.parametrize(
    ("tree", "last"),
    [
        ({"w": jnp.zeros(5)}, None),
        ({"w": jnp.zeros((0, 4, 2))}, None),
        ({"w": jnp.zeros((3, 4, 2)), "b": jnp.zeros((3, 5))}, None),
        ({"w": jnp.zeros((3, 4, 2))}, 4),
        ({}, None),
        (None, 2),
    ],
)
def test_bad_history(tree, last):
    with refused(E.ParticleError, "shape", r"\[T, M, \.\.\.\]"):
        plain.snapshots(tree, last)


def test_empty_history():
    history = History(np.zeros(0, np.int64), {"w": np.zeros((0, 4, 3, 2))})
    with refused(E.ParticleError, "no clouds.*expected thin <= steps"):
        plain.categorical(linear, history, X)


def test_scores_of_inputs_are_arrays(rng):
    pred = plain.categorical(
        linear, {"w": jnp.zeros((4, 3, 2)), "b": jnp.zeros((4, 2))}, jnp.ones((5, 3))
    )
    for wrong in (pred, pred.entropy()):
        with pytest.raises(E.DataError, match=r"inside is \w+; expected a score for each input"):
            plain.auroc(wrong, pred.entropy().total)


def normal_mixture(tail=(3,)):
    rng = np.random.default_rng(3)
    means, sds = 3 * rng.normal(size=(4, 6, *tail)), rng.uniform(0.2, 2, size=(4, 6, *tail))
    return plain.Normal(means, sds), means, sds


@pytest.mark.parametrize("tail", [(), (3,)])
def test_quantiles_of_numbers(tail):
    """Where the distribution function, written out, is q."""
    from scipy.stats import norm

    pred, means, sds = normal_mixture(tail)
    for q in (0.001, 0.05, 0.5, 0.9):
        place = pred.quantile(q)
        assert place.shape == (6, *tail)
        found = np.mean([norm.cdf(place, m, s) for m, s in zip(means, sds, strict=True)], 0)
        np.testing.assert_allclose(found, q, rtol=1e-9)
    low, high = pred.quantile(0.05), pred.quantile(0.95)
    y = means[0] + sds[0] * np.random.default_rng(4).normal(size=(6, *tail))
    assert pred.score(y).coverage == pytest.approx(np.mean((y >= low) & (y <= high)))
    for q in (0.0, 1.0, -1, "half", float("nan")):
        with refused(E.OptionError, "q is .*; expected"):
            pred.quantile(q)


def test_what_makes_the_spread_of_numbers(key):
    pred, means, sds = normal_mixture()
    np.testing.assert_allclose(pred.data_sd**2, (sds**2).mean(0), rtol=1e-12)
    np.testing.assert_allclose(pred.model_sd**2, means.var(0), rtol=1e-12)
    np.testing.assert_allclose(pred.sd**2, pred.data_sd**2 + pred.model_sd**2, rtol=1e-12)
    assert plain.Normal(means, sds[:, :1, :1]).data_sd.shape == (6, 3)
    draws = pred.draw(key, 40_000)
    np.testing.assert_array_equal(draws, pred.draw(key, 40_000))
    np.testing.assert_allclose(draws.mean(0), pred.mean, atol=0.1)
    np.testing.assert_allclose(draws.std(0), pred.sd, rtol=0.03)
    # All rows of a draw are of one particle.
    wanted = np.einsum("ma,mb->ab", *[(means - means.mean(0)).reshape(4, -1)] * 2) / 4
    found = np.cov(draws.reshape(len(draws), -1).T)
    off = ~np.eye(18, dtype=bool)
    np.testing.assert_allclose(found[off], wanted[off], atol=0.4)
    with refused(E.OptionError, "num is 0"):
        pred.draw(key, 0)


def test_predictions_one_by_one():
    numbers, means, _ = normal_mixture()
    assert len(numbers) == 6
    np.testing.assert_allclose([row.mean[0] for row in numbers], means.mean(0))
    classes = plain.categorical(lambda w, x: x @ w, jnp.ones((2, 3, 4)), jnp.eye(3))
    assert len(classes) == 3
    assert [row.probs.shape for row in classes] == [(1, 4)] * 3


@pytest.mark.parametrize(
    ("means", "sds", "words"),
    [
        (np.zeros((2, 0)), np.ones((2, 0)), "sds have shape"), (np.zeros((0, 3)), np.ones((0, 3)), "sds have shape"),
        ([[1.0], [1.0, 2.0]], [[1.0]], "no array of numbers"), ([["a"]], [[1.0]], "dtype <U1; expected real numbers"),
        (np.ones((2, 3), complex), np.ones((2, 3)), "dtype complex128; expected real numbers"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_predictions(means, sds, words):
    with refused(E.DataError, words):
        plain.Normal(means, sds)
