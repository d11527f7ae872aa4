"""Targets: scores by one gradient, minibatches unbiased, the factor N / n once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import target as target_module

N = 24


def log_prior(params):
    return -0.5 * (jnp.sum(params["w"] ** 2) + params["b"] ** 2)


def log_likelihood(params, batch):
    mean = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return -0.5 * (batch["y"] - mean) ** 2


@pytest.fixture
def data(x64):
    keys = jax.random.split(jax.random.key(5))
    return {"x": jax.random.normal(keys[0], (N, 3)), "y": jax.random.normal(keys[1], (N,))}


@pytest.fixture
def cloud(x64):
    keys = jax.random.split(jax.random.key(6))
    return {"w": jax.random.normal(keys[0], (5, 3)), "b": jax.random.normal(keys[1], (5,))}


def target(num_data=N):
    return px.Target(log_prior=log_prior, log_likelihood=log_likelihood, num_data=num_data)


def slow_score(cloud, data, scale):
    """Values and gradients by hand, one particle and one datum at a time."""
    values, scores = [], {"w": [], "b": []}
    for w, b in zip(np.asarray(cloud["w"]), np.asarray(cloud["b"]), strict=True):
        value, dw, db = -0.5 * (w @ w + b * b), -w.copy(), -b
        for x, y in zip(np.asarray(data["x"]), np.asarray(data["y"]), strict=True):
            mean = np.tanh(x @ w + b)
            value += scale * -0.5 * (y - mean) ** 2
            slope = scale * (y - mean) * (1 - mean**2)
            dw, db = dw + slope * x, db + slope
        values.append(value)
        scores["w"].append(dw)
        scores["b"].append(db)
    return np.array(values), {k: np.array(v) for k, v in scores.items()}


def close(a, b, tol=1e-10):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tol, atol=tol)


def test_full_batch_score(cloud, data):
    close(target().score(cloud, data), slow_score(cloud, data, 1.0))


@pytest.mark.parametrize("n", [1, 6, 24])
def test_factor_once(cloud, data, n):
    batch = jax.tree.map(lambda leaf: leaf[:n], data)
    close(target().score(cloud, batch), slow_score(cloud, batch, N / n))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 12, 24])
def test_minibatch_score_is_unbiased(cloud, data, n, key):
    """The mean over the batches of one epoch is the full-batch score when n divides N."""
    minibatches, problem = px.Minibatches(data, n), target()
    assert minibatches.batches_per_epoch == N // n
    parts = [
        problem.score(cloud, minibatches.batch(key, jnp.array(step))) for step in range(N // n)
    ]
    close(jax.tree.map(lambda *leaves: sum(leaves) / (N // n), *parts), problem.score(cloud, data))


def test_a_single_minibatch_differs_from_the_full_score(cloud, data, key):
    batch = px.Minibatches(data, 3).batch(key, jnp.array(0))
    assert not np.allclose(target().score(cloud, batch)[0], target().score(cloud, data)[0])


def test_value_of_one_particle(cloud, data):
    one = jax.tree.map(lambda leaf: leaf[2], cloud)
    np.testing.assert_allclose(target()(one, data), target().score(cloud, data)[0][2], rtol=1e-12)


def test_plain_density_on_nested_pytrees(x64):
    plain = px.Target(lambda p: -jnp.sum(p["a"][0] ** 2) - jnp.sum(jnp.cos(p["a"][1]) * p["c"]))
    cloud = {"a": (jnp.ones((4, 2, 3)), jnp.arange(4.0)), "c": jnp.full(4, 2.0)}
    values, scores = plain.score(cloud)
    assert jax.tree.structure(scores) == jax.tree.structure(cloud)
    np.testing.assert_allclose(values, -6 - 2 * np.cos(np.arange(4.0)))
    np.testing.assert_allclose(scores["a"][0], -2 * np.ones((4, 2, 3)))
    np.testing.assert_allclose(scores["a"][1], 2 * np.sin(np.arange(4.0)))
    np.testing.assert_allclose(scores["c"], -np.cos(np.arange(4.0)))


class Bell(eqx.Module):
    precision: jax.Array

    def __call__(self, x):
        return -0.5 * x @ self.precision @ x

    def named(self, x):
        return self(x)


@pytest.mark.parametrize("method", [False, True])
def test_callable_module_as_log_density(x64, method, key):
    """It may hold arrays, and the flow still works under plain `jax.jit`."""
    precision = jnp.array([[2.0, 0.5], [0.5, 1.0]])
    bell = Bell(precision)
    plain = px.Target(bell.named if method else bell)
    x = jax.random.normal(key, (6, 2))
    np.testing.assert_allclose(plain.score(x)[1], -x @ precision, rtol=1e-12)
    flow = px.svgd(plain, step_size=0.1)
    state, info = jax.jit(flow.step)(key, flow.init(x))
    np.testing.assert_allclose(info.score, -x @ precision, rtol=1e-12)
    assert int(state.step) == 1


def test_modules_in_prior_and_likelihood(x64, key):
    class Likelihood(eqx.Module):
        scale: jax.Array

        def __call__(self, x, batch):
            return -0.5 * self.scale * (batch - x[0]) ** 2

    data = jnp.arange(4.0)
    both = px.Target(
        log_prior=Bell(jnp.eye(2)), log_likelihood=Likelihood(jnp.array(2.0)), num_data=8
    )
    x = jax.random.normal(key, (3, 2))
    want = -np.asarray(x).copy()
    want[:, 0] += 2.0 * 2.0 * (np.asarray(data).sum() - 4 * np.asarray(x)[:, 0])
    np.testing.assert_allclose(both.score(x, data)[1], want, rtol=1e-12)
    flow = px.sgld(both, step_size=0.01)
    jax.jit(flow.step)(key, flow.init(x), data)


def test_one_gradient_for_all_particles(key):
    """The density is traced once, whatever M."""
    calls = []

    def density(x):
        calls.append(x.shape)
        return -0.5 * jnp.sum(x**2)

    px.Target(density).score(jnp.ones((50, 3)))
    assert calls == [(3,)]


def test_dtype_follows_the_particles():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        values, scores = px.Target(lambda x: -jnp.sum(x**2)).score(jnp.ones((3, 2), dtype))
        assert values.dtype == scores.dtype == dtype


# Gaussian priors, whose slope is added apart


def gaussian(prior, dtype=jnp.float32):
    likelihood = lambda p, b: jnp.sum(p) * b["x"].astype(dtype)
    target = px.Target(log_prior=prior, log_likelihood=likelihood, num_data=4)
    return target, {"x": jnp.full(2, -12.0)}


def test_values_keep_the_slope_of_a_prior():
    target, batch = gaussian(px.priors.GaussianPrior(0.5))
    x = jnp.array([[1.0, 2.0, 3.0]])
    slope = jax.grad(lambda x: target.score(x, batch)[0].sum())(x)
    np.testing.assert_allclose(slope, target.score(x, batch)[1])
    np.testing.assert_allclose(slope, [[-50.0, -52.0, -54.0]])


def test_priors_that_are_not_plain_are_differentiated():
    class Off(px.priors.GaussianPrior):
        def __call__(self, params):
            return super().__call__(params - 10)

    target, batch = gaussian(Off(0.5))
    assert target.precision is None
    scores = target.score(jnp.array([[1.0, 2.0, 3.0]]), batch)[1]
    np.testing.assert_allclose(scores, [[-30.0, -32.0, -34.0]])
    plain = gaussian(px.priors.GaussianPrior(0.5))[0]
    flat = eqx.tree_at(lambda t: t.log_prior, plain, lambda p: 0.0)
    scores = flat.score(jnp.array([[1.0, 2.0, 3.0]]), batch)[1]
    np.testing.assert_allclose(scores, [[-48.0, -48.0, -48.0]])


@pytest.mark.parametrize(("dtype", "variance"), [(jnp.float16, 1e-5), (jnp.bfloat16, 0.3)])
def test_half_precision_particles_have_a_whole_prior(dtype, variance):
    target = px.Target(log_prior=px.priors.GaussianPrior(variance), log_likelihood=lambda p, b: 0.0 * jnp.sum(p) * b, num_data=2)  # fmt: skip
    x = jnp.array([[0.01, 0.0, 0.02]], dtype)
    scores = np.asarray(target.score(x, jnp.ones(2, dtype))[1], float)
    np.testing.assert_allclose(scores, -np.asarray(x, float) / variance, rtol=2.0**-8)


@pytest.mark.parametrize("stateful", [False, True])
def test_rows_are_handed_out_for_wide_matrices_alone(key, stateful, monkeypatch):
    """Copies for each particle of the rows that are multiplied with a wide matrix, of nothing else; the same scores."""

    def likelihood(p, batch, *rest):
        hidden = jnp.tanh(batch["x"] @ p["first"] + batch["z"] @ p["narrow"])
        found = hidden @ p["last"] - batch["y"]
        return (found, *rest[:1]) if stateful else found

    target = px.Target(
        log_prior=lambda p: 0.0, log_likelihood=likelihood, num_data=7, stateful=stateful
    )
    size = target_module.WIDE
    shapes = {"first": (5, size), "narrow": (3, 1), "last": (size,)}
    particles = {n: jax.random.normal(jax.random.fold_in(key, i), (4, *s)) for i, (n, s) in enumerate(shapes.items())}  # fmt: skip
    batch = {"x": jnp.ones((7, 5)), "y": jnp.arange(7.0), "z": jnp.ones((7, 3))}
    carried = jnp.zeros((4, 1)) if stateful else ()
    rows, axes = target_module._handed_out(batch, particles)
    assert axes == {"x": 0, "y": None, "z": None} and rows["x"].shape == (4, 7, 5)
    found = target.evaluate(particles, batch, carried, key)
    text = str(jax.make_jaxpr(lambda p: target.evaluate(p, batch, carried, key))(particles))
    monkeypatch.setattr(target_module, "FEW", 6)
    assert target_module._handed_out(batch, particles)[1] == dict.fromkeys("xyz")
    other = target.evaluate(particles, batch, carried, key)
    assert text != str(jax.make_jaxpr(lambda p: target.evaluate(p, batch, carried, key))(particles))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, other)
