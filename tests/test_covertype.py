"""The logistic regression of figure 2 against NumPy in float64."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from experiments import covertype
from experiments.fetching import DatasetError


def log_density(w, log_alpha, x, y):
    """w | alpha ~ N(0, 1/alpha), alpha ~ Gamma(1, rate 0.01) in log alpha, Bernoulli labels."""
    alpha = np.exp(log_alpha)
    prior = sum(0.5 * np.log(alpha) - 0.5 * alpha * v**2 for v in w)
    prior += np.log(0.01 * np.exp(-0.01 * alpha)) + log_alpha  # its density, and the Jacobian
    chance = 1 / (1 + np.exp(-(x @ w)))
    return prior + np.sum(y * np.log(chance) + (1 - y) * np.log(1 - chance))


@pytest.fixture(scope="module")
def split():
    return covertype.problem("synthetic", 3)


def test_the_posterior(split):
    """Differences, since constants do not matter."""
    rng = np.random.default_rng(0)
    x, y = (np.asarray(split.train[k], float) for k in ("x", "y"))
    points = [(rng.normal(size=split.dim), rng.normal()) for _ in range(3)]
    ours = [
        float(split.target({"w": jnp.asarray(w), "log_alpha": jnp.asarray(a)}, split.train))
        for w, a in points
    ]
    theirs = [log_density(w, a, x, y) for w, a in points]
    np.testing.assert_allclose(np.diff(ours), np.diff(theirs), rtol=1e-4)


def test_the_split(split):
    assert split.num_data == 4000
    assert len(split.test["y"]) == 1000
    assert np.all(np.asarray(split.train["x"])[:, -1] == 1)
    few = covertype.problem("synthetic", 3, 50)
    np.testing.assert_array_equal(few.train["x"], split.train["x"][:50])
    np.testing.assert_array_equal(few.test["x"], split.test["x"])
    rows = np.concatenate([np.asarray(split.train["x"]), np.asarray(split.test["x"])])
    assert len(np.unique(rows, axis=0)) == 5000  # nothing is in both parts
    other = covertype.problem("synthetic", 4)
    assert not np.array_equal(other.train["x"], split.train["x"])


def test_the_start_is_the_prior():
    start = covertype.start(jax.random.key(0), 20000, 3)
    alpha = np.exp(np.asarray(start["log_alpha"], float))
    assert abs(alpha.mean() / 100 - 1) < 0.05
    assert abs((alpha < 100 * np.log(2)).mean() - 0.5) < 0.02  # the median of an exponential
    scaled = np.asarray(start["w"], float) * np.sqrt(alpha)[:, None]
    np.testing.assert_allclose(scaled.std(), 1, atol=0.02)


def test_predictions_are_those_of_the_mixture(split):
    w = np.random.default_rng(1).normal(size=(7, split.dim))
    x, y = (np.asarray(split.test[k], float) for k in ("x", "y"))
    chance = np.mean(1 / (1 + np.exp(-(x @ w.T))), axis=1)
    seen = covertype.predict(jnp.asarray(w, jnp.float32), split.test)
    np.testing.assert_allclose(seen["accuracy"], np.mean((chance > 0.5) == (y == 1)), atol=2e-3)
    likely = np.mean(np.log(np.where(y == 1, chance, 1 - chance)))
    np.testing.assert_allclose(seen["log_likelihood"], likely, rtol=1e-4)


def test_a_tie_is_one_of_the_classes(split):
    """Two particles that contradict each other leave every row at one half."""
    w = np.random.default_rng(1).normal(size=split.dim)
    both = jnp.asarray(np.stack([w, -w]), jnp.float32)
    share = float(jnp.mean(split.test["y"]))
    assert float(covertype.predict(both, split.test)["accuracy"]) >= min(share, 1 - share) - 1e-6


def test_a_particle_that_is_sure_and_wrong_has_a_finite_log_likelihood(split):
    sure = jnp.full((1, split.dim), 100.0)
    assert -1e4 < float(covertype.predict(sure, split.test)["log_likelihood"]) < -10


def test_the_laplace_approximation(split):
    """Its mean is a mode over w and log alpha, its covariance the inverse curvature there."""
    posterior = covertype.laplace("synthetic", 3)
    x, y = (np.asarray(split.train[k], float) for k in ("x", "y"))
    w = posterior.mean
    log_alpha = np.log(
        (len(w) / 2 + 1) / (w @ w / 2 + 0.01)
    )  # where the slope in log alpha vanishes
    point = np.append(w, log_alpha)
    value = lambda p: log_density(p[:-1], p[-1], x, y)
    step = 1e-3
    directions = step * np.eye(len(point))
    slope = [(value(point + d) - value(point - d)) / (2 * step) for d in directions]
    np.testing.assert_allclose(slope, 0, atol=1e-2)
    curve = np.array([
        [
            (value(point + a + b) - value(point + a - b) - value(point - a + b) + value(point - a - b))
            / (4 * step**2)
            for b in directions
        ]
        for a in directions
    ])  # fmt: skip
    np.testing.assert_allclose(
        posterior.covariance, np.linalg.inv(-curve)[:-1, :-1], rtol=2e-3, atol=1e-5
    )
    drawn = posterior.draws(20000, 0)
    np.testing.assert_allclose(
        np.cov(drawn.T), posterior.covariance, atol=0.03 * np.max(posterior.covariance)
    )


def test_the_real_rows():
    if not os.environ.get("PARTICLAX_DATA"):
        pytest.skip("PARTICLAX_DATA does not name a folder with covtype/covtype.data.gz")
    try:
        x, y = covertype.table("covertype")
    except DatasetError as error:
        pytest.skip(f"no Covertype there: {error}")
    assert x.shape == (581012, 55)
    assert int(y.sum()) == 283301
    np.testing.assert_array_equal(x.min(0), [0] * 54 + [1])
    np.testing.assert_array_equal(x.max(0), 1)


@pytest.mark.parametrize("source", ["synthetic", "covertype"])
def test_a_streamed_run_is_the_run_in_memory(source, tmp_path, key):
    """Rows on the disk, shuffled as those in memory are, in blocks of a few steps: bit for bit."""
    if source == "covertype" and not os.environ.get("PARTICLAX_DATA"):
        pytest.skip("PARTICLAX_DATA does not name a folder with covtype/covtype.data.gz")
    try:
        problem = covertype.problem(source, 0)
    except DatasetError as error:
        pytest.skip(f"no Covertype there: {error}")
    for name, rows in problem.train.items():
        np.save(tmp_path / f"{name}.npy", rows)
    disk = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in problem.train}
    flow = px.sgld(problem.target, step_size=1e-6)
    start = covertype.start(key, 20, problem.dim)
    streamed, inside = (
        px.run(flow, start, steps=200, key=key, data=data, progress=False).particles
        for data in (px.Stream(disk, 50), px.Minibatches(problem.train, 50))
    )
    assert np.array_equal(streamed["w"], inside["w"])
    assert np.array_equal(streamed["log_alpha"], inside["log_alpha"])


def test_softplus_and_its_derivative():
    z = np.linspace(-30, 30, 601)
    found = [np.asarray(f(jnp.asarray(z, jnp.float32))) for f in (covertype.softplus, jax.vmap(jax.grad(covertype.softplus)))]  # fmt: skip
    np.testing.assert_allclose(found[0], np.logaddexp(z, 0), rtol=1e-6, atol=2e-7)
    np.testing.assert_allclose(found[1], 1 / (1 + np.exp(-z)), rtol=1e-5)
