"""Few particles in many dimensions: fused kernels (interpreted) and plain path against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import gpu, pairwise, skinny

SHAPES = [(2, 8192), (5, 8193), (16, 9000), (20, 12_345), (33, 8200), (64, 8321)]


@pytest.fixture(params=["plain", "interpret"])
def mode(request, monkeypatch):
    monkeypatch.setattr(gpu, "MODE", None if request.param == "plain" else "interpret")
    return request.param


def cloud(num, dim, centre=3.0, spread=0.1, seed=0):
    rng = np.random.default_rng(seed)
    x = (centre + spread * rng.normal(size=(num, dim))).astype(np.float32)
    v = rng.normal(size=(num, dim)).astype(np.float32)
    left, right = rng.normal(size=(2, num, num)).astype(np.float32)
    return x, v, left, right


def relative(found, truth):
    return np.abs(np.asarray(found, float) - truth).max() / np.abs(truth).max()


@pytest.mark.parametrize(("num", "dim"), SHAPES)
def test_gram_is_that_of_the_centred_cloud(num, dim, mode):
    x = cloud(num, dim)[0]
    product, norm = skinny.gram(jnp.asarray(x))
    mean = x.astype(float).mean(0)
    truth = (x - mean) @ (x - mean).T
    assert relative(product, truth) < 2e-6
    assert relative(product, np.asarray(product, float).T) < 1e-6
    assert relative(norm, np.sum(mean**2)) < 2e-6


@pytest.mark.parametrize(("num", "dim"), SHAPES)
def test_mix_is_the_sum_of_products(num, dim, mode):
    x, v, left, right = cloud(num, dim, centre=1.0)
    centred = x - x.astype(float).mean(0)
    both = skinny.mix(*map(jnp.asarray, (left, x, right, v)))
    assert relative(both, left.astype(float) @ centred + right.astype(float) @ v) < 2e-6
    alone = skinny.mix(jnp.asarray(left), jnp.asarray(x))
    assert relative(alone, left.astype(float) @ centred) < 5e-6  # of a cloud ten times off its size


def test_modes_really_differ(monkeypatch):
    """The interpreted kernel is what runs: breaking it shows."""
    x = jnp.asarray(cloud(4, 8192)[0])
    monkeypatch.setattr(gpu, "MODE", "interpret")
    monkeypatch.setattr(gpu, "halves", lambda tile: (0 * tile, 0 * tile))
    assert float(jnp.abs(skinny.gram(x)[0]).max()) == 0


def test_kernels_lower_for_a_gpu():
    """Triton's own errors show here, without a GPU."""
    cloud = jax.ShapeDtypeStruct((20, 10_000), jnp.float32)
    weights = jax.ShapeDtypeStruct((20, 20), jnp.float32)
    for launch, args in (
        (skinny._launch_gram, (cloud,)),
        (skinny._launch_mix, (weights, cloud)),
        (skinny._launch_mix, (weights, cloud, weights, cloud)),
    ):
        try:
            program = jax.jit(launch).trace(*args).lower(lowering_platforms=("cuda",))
        except RuntimeError as error:
            pytest.skip(f"this JAX lowers for GPUs only where one is: {error}")
        assert "triton" in program.as_text()


def test_vmap_and_derivatives(mode):
    x = jnp.asarray(cloud(3, 8192, spread=1.0)[0])
    two = jax.vmap(skinny.gram)(jnp.stack([x, 2 * x]))[0]
    np.testing.assert_allclose(two[1], 4 * two[0], rtol=1e-5, atol=1e-2)
    slope = jax.grad(lambda x: skinny.gram(x)[0][0, 1])(x)
    centred = np.asarray(x, float) - np.asarray(x, float).mean(0)
    truth = np.zeros_like(centred)
    truth[0], truth[1] = centred[1], centred[0]
    truth -= truth.mean(0)
    assert relative(slope, truth) < 1e-5


def test_other_dtypes_and_sizes_take_the_plain_path(monkeypatch):
    monkeypatch.setattr(gpu, "MODE", "interpret")
    broken = lambda tile: (0 * tile, 0 * tile)
    monkeypatch.setattr(gpu, "halves", broken)
    with jax.enable_x64(True):
        assert float(skinny.gram(jnp.asarray(cloud(4, 8192)[0], jnp.float64))[0].max()) > 0
    assert float(skinny.gram(jnp.asarray(cloud(4, 100)[0]))[0].max()) > 0
    assert float(skinny.gram(jnp.asarray(cloud(65, 8192)[0]))[0].max()) > 0


def network_cloud(num, spread=0.3):
    rng = np.random.default_rng(1)
    shapes = {"a": (100, 90), "b": (90,), "c": (90, 100), "d": (100, 3), "e": ()}
    draw = lambda shape: jnp.asarray(1 + spread * rng.normal(size=(num, *shape)), jnp.float32)
    return {name: draw(shape) for name, shape in shapes.items()}


def flat(tree):
    leaves = [np.asarray(leaf, float).reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, 1)


def test_interactions_of_networks(mode):
    """Stein and blob of a cloud with large, small and scalar leaves: the formulas by double loops."""
    x, s = network_cloud(7), network_cloud(7, spread=2.0)
    points, scores = flat(x), flat(s)
    r2 = np.array([[np.sum((a - b) ** 2) for b in points] for a in points])
    h = np.median(np.sqrt(r2[np.triu_indices(7, 1)])) ** 2 / np.log(7)
    kernel = np.exp(-r2 / h)
    phi = np.zeros_like(points)
    blob = np.zeros_like(points)
    mass = kernel.sum(1)
    for i in range(7):
        for j in range(7):
            push = 2 / h * kernel[i, j] * (points[i] - points[j])
            phi[i] += (kernel[i, j] * scores[j] + push) / 7
            blob[i] += (1 / mass[i] + 1 / mass[j]) * push
    cloud = px.terms.Cloud(x, s, jnp.int32(0), px.terms.Frame(), x)
    found = px.Stein()(cloud, None, ())[0].drift
    assert relative(flat(found), phi) < 3e-6
    assert jax.tree.structure(found) == jax.tree.structure(x)
    assert [leaf.shape for leaf in jax.tree.leaves(found)] == [
        leaf.shape for leaf in jax.tree.leaves(x)
    ]
    assert relative(flat(px.diffusions.Blob()(cloud, None, ())[0].drift), blob) < 3e-5
    np.testing.assert_allclose(pairwise.sqdist(x, x), r2, rtol=2e-5, atol=1e-2)
    np.testing.assert_allclose(pairwise.mean_square(x), np.mean(np.sum(points**2, 1)), rtol=1e-6)
    np.testing.assert_allclose(
        pairwise.logsumexp(x, x, lambda r2: -r2 / h), np.log(mass), rtol=1e-4
    )
