"""The CIFAR-10 study: its network against NumPy, its augmentation, its tables."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from benchmarks import absent
from experiments import cifar, cifar_tables, cifar_time, config, datasets
from experiments import cifar_network as net
from particlax import gpu

COMPILE_FAST = True

TINY = cifar.Config(
    particles=2, epochs=1, evaluations=1, widths=(8, 8, 8), dense=16, precision="float32", data="synthetic"
)  # fmt: skip


def slow_convolution(x, w):
    """3x3 with zeros beyond the border, in float64, pixel by pixel."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    n, height, width, _ = x.shape
    out = np.zeros((n, height, width, w.shape[-1]))
    for i in range(height):
        for j in range(width):
            for di in (-1, 0, 1):
                for dj in (-1, 0, 1):
                    if 0 <= i + di < height and 0 <= j + dj < width:
                        out[:, i, j] += x[:, i + di, j + dj] @ w[di + 1, dj + 1]
    return out


@pytest.mark.parametrize("how", ["patches", "conv"])
@pytest.mark.parametrize("channels", [3, 8])  # 27 rows are filled up to 32, 72 are not
def test_convolution_is_the_slow_one(key, how, channels):
    x = jax.random.normal(key, (2, 6, 4, channels))
    w = jax.random.normal(jax.random.key(1), (3, 3, channels, 5))
    want = slow_convolution(x, w)
    np.testing.assert_allclose(net.convolve(x, w, how), want, atol=1e-4)
    rounded = net.convolve(x.astype(jnp.bfloat16), w, how)
    assert rounded.dtype == jnp.bfloat16
    close = slow_convolution(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    np.testing.assert_allclose(rounded.astype(float), close, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("how", ["patches", "conv"])
def test_gradient_of_the_convolution(key, how):
    # sum(conv(x, w) * g) is linear in each: its gradient by w[a, b] is sum over pixels of x there times g here
    x, g = (jax.random.normal(jax.random.fold_in(key, i), (2, 5, 4, 3)) for i in range(2))
    w = jax.random.normal(key, (3, 3, 3, 3))
    dx, dw = jax.grad(lambda x, w: jnp.sum(net.convolve(x, w, how) * g), (0, 1))(x, w)
    wide, want = np.pad(np.asarray(x, float), ((0, 0), (1, 1), (1, 1), (0, 0))), np.zeros(w.shape)
    for a in range(3):
        for b in range(3):
            part = wide[:, a : a + 5, b : b + 4]
            want[a, b] = np.einsum("nhwc,nhwd->cd", part, np.asarray(g, float))
    np.testing.assert_allclose(dw, want, atol=1e-4)
    turned = np.asarray(w)[::-1, ::-1].transpose(0, 1, 3, 2)
    np.testing.assert_allclose(dx, slow_convolution(g, turned), atol=1e-4)


def test_gradients_of_weights_are_float32(key):
    x = jax.random.normal(key, (300, 4)).astype(jnp.bfloat16)
    w = jax.random.normal(key, (4, 3))
    out, back = jax.vjp(net.product, x, w)
    g = jax.random.normal(jax.random.key(1), out.shape).astype(jnp.bfloat16)
    dx, dw = back(g)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(dw, np.asarray(x, float).T @ np.asarray(g, float), rtol=1e-5, atol=1e-4)  # fmt: skip


def test_patches_of_the_first_layer_are_made_once():
    shape = net.Shape((8, 8, 8), 16, side=8, precision="float32")
    params, carried = net.network(shape).init(jax.random.key(0), 3)
    x = jnp.zeros((5, 8, 8, 3), jnp.uint8)
    loss = lambda p, c: jnp.sum(net.logits(shape, p, x, c, jax.random.key(0))[0])
    text = str(jax.make_jaxpr(jax.vmap(jax.grad(loss)))(params, carried))
    assert "f32[5,8,8,27]" in text and "f32[3,5,8,8,27]" not in text
    assert "f32[3,5,4,4,72]" in text


def test_patches_by_a_kernel_are_the_plain_ones(key, monkeypatch):
    x = jax.random.normal(key, (2, 3, 5, 8, 16)).astype(jnp.bfloat16)  # two networks
    want = jax.vmap(net.patches)(x)
    with absent.named():
        program = jax.jit(jax.vmap(net.copied)).trace(x).lower(lowering_platforms=("cuda",))
    assert "_copy_body" in program.as_text()
    monkeypatch.setattr(gpu, "MODE", "interpret")
    np.testing.assert_array_equal(jax.vmap(net.copied)(x).astype(float), want.astype(float))
    assert net.fits(x[0]) and not net.fits(x[0].astype(jnp.float32)) and not net.fits(x[0, :, :, :5])  # fmt: skip
    np.testing.assert_array_equal(jax.vmap(net.surroundings)(x).astype(float), want.astype(float))


def test_gradient_of_the_patches_is_their_transpose(key):
    x = jax.random.normal(key, (2, 5, 4, 3))
    g = jax.random.normal(jax.random.key(1), (2, 5, 4, 27))
    (got,) = jax.vjp(net.surroundings, x)[1](g)
    want = np.zeros((2, 7, 6, 3))
    for place in range(9):
        i, j = divmod(place, 3)
        want[:, i : i + 5, j : j + 4] += np.asarray(g, float)[..., 3 * place : 3 * place + 3]
    np.testing.assert_allclose(got, want[:, 1:-1, 1:-1], atol=1e-5)


def test_pool_and_its_gradient():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, size=(2, 4, 6, 3)).astype(np.float32)  # many equals
    g = rng.normal(size=(2, 2, 3, 3)).astype(np.float32)
    out, back = jax.vjp(net.pool, jnp.asarray(x))
    np.testing.assert_array_equal(out, x.reshape(2, 2, 2, 3, 2, 3).max((2, 4)))
    want = np.zeros_like(x)
    for n, i, j, c in np.ndindex(g.shape):
        window = x[n, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2, c]
        a, b = np.unravel_index(window.argmax(), (2, 2))
        want[n, 2 * i + a, 2 * j + b, c] = g[n, i, j, c]
    np.testing.assert_array_equal(back(jnp.asarray(g))[0], want)


def test_gradient_of_batch_norm_is_the_derived_one(key, x64):
    x = 3 + 2 * jax.random.normal(key, (6, 5, 4, 3))
    layer = {"scale": jnp.array([1.0, 2.0, 0.5]), "bias": jnp.array([0.0, -1.0, 3.0])}
    g = jax.random.normal(jax.random.key(1), x.shape)
    plain = lambda x, layer: net.normed(x, layer, net.moments(x))
    want = jax.grad(lambda *args: jnp.sum(plain(*args) * g), (0, 1))(x, layer)
    got = jax.grad(lambda *args: jnp.sum(net.batch_normed(*args)[0] * g), (0, 1))(x, layer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
    out, seen = net.batch_normed(x, layer)
    np.testing.assert_array_equal(out, plain(x, layer))
    np.testing.assert_array_equal(seen["var"], net.moments(x)["var"])


def test_batch_norm_is_numpys(key):
    x = 3 + 2 * jax.random.normal(key, (16, 5, 4, 3))
    layer = {"scale": jnp.array([1.0, 2.0, 0.5]), "bias": jnp.array([0.0, -1.0, 3.0])}
    seen = net.moments(x)
    wide = np.asarray(x, np.float64)
    mean, var = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    np.testing.assert_allclose(seen["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(seen["var"], var, rtol=1e-4)
    want = (wide - mean) / np.sqrt(var + 1e-5) * [1, 2, 0.5] + [0, -1, 3]
    np.testing.assert_allclose(net.normed(x, layer, seen), want, atol=1e-4)


def test_running_statistics_follow_the_batches_and_make_the_predictions(key):
    shape = net.Shape((4, 4, 4), 6, (0.0,) * 4, 8, precision="float32", momentum=0.9)
    params, carried = net.start(shape, key)
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 256, (20, 8, 8, 3)).astype(np.uint8) for _ in range(2))
    want = {"mean": np.zeros(4), "var": np.ones(4)}
    for x in (first, second):
        _, carried = net.logits(shape, params, jnp.asarray(x), carried, key)
        scaled = (x / 255 - np.array(net.MEAN)) / np.array(net.SD)
        out = slow_convolution(scaled, params["conv1"])
        out = out.reshape(20, 4, 2, 4, 2, 4).max((2, 4))
        want["mean"] = 0.9 * want["mean"] + 0.1 * out.mean((0, 1, 2))
        want["var"] = 0.9 * want["var"] + 0.1 * out.var((0, 1, 2))
    np.testing.assert_allclose(carried[0]["mean"], want["mean"], atol=1e-4)
    np.testing.assert_allclose(carried[0]["var"], want["var"], rtol=1e-3)
    apply = net.network(shape).apply
    alone = apply(params, jnp.asarray(first[:1]), carried)
    np.testing.assert_allclose(apply(params, jnp.asarray(first), carried)[:1], alone, atol=1e-4)


def test_dropout_keeps_its_share_and_the_mean(key):
    x = jnp.ones((100, 1001))
    out = np.asarray(net.dropped(x, 0.3, key))
    bar = round(256 * 0.3)
    assert set(np.unique(out)) == {np.float32(0), np.float32(256 / (256 - bar))}
    assert abs(np.mean(out == 0) - bar / 256) < 0.006  # four sd
    assert net.dropped(x, 0.0, key) is x


def test_crops_and_mirrors_are_exact(key):
    x = np.random.default_rng(0).integers(0, 256, (60, 9, 8, 3)).astype(np.uint8)
    out = np.asarray(net.augmented(key, jnp.asarray(x), 2))
    wide = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    seen = set()
    for n in range(60):
        views = {
            (i, j, turn): wide[n, i : i + 9, j : j + 8][:, :: 1 - 2 * turn]
            for i in range(5)
            for j in range(5)
            for turn in range(2)
        }
        fits = [name for name, view in views.items() if np.array_equal(view, out[n])]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) > 20 and {turn for _, _, turn in seen} == {0, 1}


def test_cutout_paints_a_square(key):
    x = jnp.full((200, 9, 8, 3), 7, jnp.uint8)
    gone = np.all(np.asarray(net.augmented(key, x, 0, 3)) == net.GREY, -1)
    rows, columns = gone.any(2).sum(1), gone.any(1).sum(1)
    np.testing.assert_array_equal(gone.sum((1, 2)), rows * columns)
    assert set(rows) == set(columns) == {1, 2, 3}  # less than 3 at a border
    assert gone.any(0).all()


def test_batches_are_augmented_by_key_and_step(key):
    x = np.random.default_rng(0).integers(0, 256, (32, 8, 8, 3)).astype(np.uint8)
    data = px.Minibatches({"x": x, "y": np.arange(32)}, 16, transform=net.augmenting(1))
    one, again = (data.batch(key, jnp.array(3)) for _ in range(2))
    np.testing.assert_array_equal(one["x"], again["x"])
    plain = x[np.asarray(one["y"])]
    assert one["x"].dtype == jnp.uint8 and not np.array_equal(one["x"], plain)
    still = px.Minibatches({"x": x, "y": np.arange(32)}, 16, transform=net.augmenting(0))
    still = still.batch(key, jnp.array(3))
    np.testing.assert_array_equal(still["y"], one["y"])
    same = np.all(np.asarray(still["x"]) == plain, (1, 2, 3))
    assert 0 < same.sum() < 16  # the others are mirrored


@pytest.mark.parametrize("method", cifar.METHODS)
def test_every_method_traces_at_full_size(method):
    c = cifar.Config(particles=3)
    moving = cifar.flow(c, method, 50_000, 32, 1000)
    make = lambda: moving.init(*net.network(cifar.shape(c, 32)).init(jax.random.key(0), 3))
    state = jax.eval_shape(make)
    batch = {
        "x": jax.ShapeDtypeStruct((128, 32, 32, 3), np.uint8),
        "y": jax.ShapeDtypeStruct((128,), np.int32),
    }
    after, _ = jax.eval_shape(moving.step, jax.random.key(0), state, batch)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), after)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    sizes = [leaf.size for leaf in jax.tree.leaves(state.particles)]
    assert sum(sizes) == 3 * (1728 + 73728 + 294912 + 4096 * 1024 + 10250 + 2 * 1472)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves((after.particles, after.carried)))  # fmt: skip


def test_a_run_learns_and_is_repeatable():
    c = dataclasses.replace(
        TINY, epochs=10, evaluations=2, batch=32, rate=1e-2, dropout=(0.0,) * 4, crop=0
    )
    found = [list(cifar.work(c, "Adam", 0)) for _ in range(2)]
    first, last = (seen.metrics for seen in found[0])
    assert last["epoch"] == 10 and last["accuracy"] > 60  # of 10 classes
    assert last["train_nll"] < first["train_nll"]
    again = found[1][-1].metrics
    assert {k: v for k, v in again.items() if k != "ms"} == {k: v for k, v in last.items() if k != "ms"}  # fmt: skip
    assert next(cifar.runs(c)).settings["widths"] == [8, 8, 8]


def test_last_layers_alone_are_particles():
    """The others are shared: the state has M of the named layers and one of all else, and learns."""
    c = dataclasses.replace(TINY, epochs=8, batch=32, rate=1e-2, dropout=(0.0,) * 4, crop=0, bayesian="out")  # fmt: skip
    _, state, _, _ = cifar.begun(c, "w-SGLD-B", 0)
    assert px.networks.leaf_names(state.particles) == ["out/b", "out/w"]
    assert state.shared.values["conv1"].shape == (3, 3, 3, 8)
    (last,) = cifar.work(c, "w-SGLD-B", 0)
    assert last.metrics["accuracy"] > 50
    with pytest.raises(px.errors.OptionError, match="split names 'head'"):
        cifar.begun(dataclasses.replace(c, bayesian="head"), "SVGD", 0)


def test_held_out_images_are_not_trained_on():
    whole, part = cifar.pictures("synthetic"), cifar.pictures("synthetic", 100, 40)
    np.testing.assert_array_equal(part.train_images, whole.train_images[:100])
    np.testing.assert_array_equal(part.test_images, whole.train_images[-40:])
    np.testing.assert_array_equal(part.test_labels, whole.train_labels[-40:])


def test_rates():
    cosine, paper = (
        cifar.decayed(dataclasses.replace(TINY, schedule=name), 1e-3, 20_000)
        for name in ("cosine", "paper")
    )
    assert np.isclose(cosine(0), 1e-3) and np.isclose(cosine(10_000), 5e-4)
    assert abs(float(cosine(20_000))) < 1e-9
    at = [float(paper(step)) for step in (0, 4999, 5001, 9999, 10_001)]
    np.testing.assert_allclose(at, [0.01, 0.01, 0.001, 0.001, 0.0001], rtol=1e-5)


def test_priors_by_layer():
    assert cifar.variances("0.5") == {"": 0.5}
    assert cifar.variances("1; dense=0.1;out=2e-2") == {"": 1.0, "dense": 0.1, "out": 0.02}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": "Adam; SVGDD"}, "no method 'SVGDD'"),
        ({"schedule": "linear"}, "expected cosine or paper"),
        ({"activation": "tanh"}, "expected relu or silu or gelu"),
        ({"conv": "fft"}, "expected patches or conv"),
        ({"precision": "float16"}, "expected bfloat16 or float32"),
        ({"optimizer": "lion"}, "expected adam or rmsprop or sgd"),
        ({"data": "cifar100"}, "expected cifar10 or synthetic or noise"),
        ({"dropout": (0.1, 0.2)}, "expected 4 rates"),
        ({"dropout": (0.1, 0.2, 0.3, 1.0)}, "expected 4 rates"),
        ({"prior": "dense=much"}, "expected variances"),
        ({"particles": 0}, "expected at least 1"),
    ],
)
def test_settings_that_make_no_sense(change, words):
    with pytest.raises(config.ConfigError, match=words):
        next(cifar.runs(dataclasses.replace(TINY, **change)))


def entry(method, accuracy, seed=0, place=(2, 2), epochs=200):
    metrics = {
        "accuracy": accuracy, "single_accuracy": accuracy - 1, "single_sd": 0.2, "nll": 0.3, "brier": 0.1,
        "ece": 0.01, "train_nll": 0.05, "ms": 4.0,
    }  # fmt: skip
    settings = {"method": method, "epochs": epochs}
    return {"config": settings, "seed": seed, "metrics": metrics, "evaluation": list(place)}


def test_tables():
    found = [
        entry("Adam", 80.0, place=(1, 2)), entry("Adam", 90.0), entry("Adam", 91.0, seed=1),
        entry("pi-SGLD, blob", 92.0), entry("Adam", 89.0, epochs=60),
    ]  # fmt: skip
    rows = cifar_tables.table(found)
    assert [row[:2] for row in rows[1:]] == [["Adam", "60"], ["Adam", "200"], ["pi-SGLD, blob", "200"]]  # fmt: skip
    assert rows[2][2:6] == [
        "2",
        "86.76 (23.80; one network)",
        "90.50 ±0.50 (ensemble)",
        "89.50 ±0.20",
    ]
    assert rows[3][2:5] == ["1", "-", "92.00"]
    along = cifar_tables.epochs(found)
    assert along[0] == ["method", "epochs", "1/2", "2/2"]
    assert along[2] == ["Adam", "200", "80.00", "90.50"] and along[3][2] == "-"
    part = entry("SVGD", 88.0)
    part["config"]["bayesian"] = "out"
    assert cifar_tables.table([part])[1][0] == "SVGD, out alone"
    odd = entry("Adam", 70.0)
    odd["config"]["prior"] = "9"
    names = [row[0] for row in cifar_tables.table([*found, odd])]
    assert names == ["method", "Adam", "Adam", "pi-SGLD, blob", "Adam, prior 9"]
    assert all(len(row) == len(rows[0]) for row in rows)
    assert len(cifar_tables.table([])) == len(cifar_tables.epochs([])) == 1


def test_times():
    """Whole networks, then last layers alone; beside Adam's."""
    smoke = dataclasses.replace(cifar_time.Config(), **cifar_time.STUDY.smoke | {"again": "SVGD"})
    whole, part = (run.settings for run in cifar_time.runs(smoke))
    assert (whole["method"], whole["bayesian"]) == ("Adam", "")
    assert (part["method"], part["bayesian"]) == ("SVGD", "out")
    seen = cifar_time.timed(smoke, "Adam")
    assert seen["ms"] > 0 and seen["compile_s"] > 0
    found = [
        {"config": {"method": name, "bayesian": ""}, "metrics": {"ms": ms, "compile_s": 9.0}, "device": "gpu"}
        for name, ms in (("Adam", 2.0), ("SVGD", 3.0))
    ]  # fmt: skip
    assert cifar_tables.times(found)[2] == ["SVGD", "3.00", "1.50", "-", "9", "gpu"]


def test_real_images():
    if not os.environ.get("PARTICLAX_DATA"):
        pytest.skip("PARTICLAX_DATA does not name a folder with cifar10/cifar-10-batches-bin")
    try:
        data = cifar.pictures("cifar10", 100)
    except datasets.DatasetError as error:
        pytest.skip(f"no CIFAR-10 there: {error}")
    assert data.train_images.shape == (100, 32, 32, 3) and len(data.test_labels) == 10_000
    scaled = (data.train_images / 255 - np.array(net.MEAN)) / np.array(net.SD)
    assert abs(scaled.mean()) < 0.2 and 0.8 < scaled.std() < 1.2
