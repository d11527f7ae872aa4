"""The zoo: formulas of the paper, moments by quadrature and by sampling, regions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

from particlax import zoo
from particlax.errors import OptionError

from . import references as ref

PLANES = ["U1", "U2", "U3", "U4"]
DENSITIES = {
    "Gaussian": lambda: zoo.Gaussian([1.0, -2.0], [[2.0, 0.6], [0.6, 0.5]]),
    "GaussianMixture": lambda: zoo.GaussianMixture(
        [[-2.0, 0.0], [2.0, 1.0], [0.0, 3.0]], sds=[0.5, 1.0, 0.7], weights=[1.0, 2.0, 3.0]
    ),
    "Banana": zoo.Banana,
    "Funnel": lambda: zoo.Funnel(dim=3, sd=0.8),  # wide funnels have no testable fourth moments
    "LogGamma": lambda: zoo.LogGamma(shape=2.0, dim=2),
    "StudentT": lambda: zoo.StudentT(dim=2, df=12.0),
    **{name: getattr(zoo, name) for name in PLANES},
}
NUM = 20000


@functools.cache
def density(name):
    return DENSITIES[name]()


@functools.cache
def draws(name):
    return np.asarray(density(name).sample(jax.random.key(5), NUM), np.float64)


@functools.cache
def quadrature(name, cells=600, extent=5.5):
    """Points and probabilities of an own, coarser grid of the NumPy formula with its box."""
    side = (np.arange(cells) + 0.5) / cells * 2 * extent - extent
    z = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    beyond = np.maximum(np.abs(z) - 4, 0)
    p = np.exp(-ref.rezende(name, np.clip(z, -8, 8)) - 0.5 * np.sum((beyond / 0.2) ** 2, 1))
    return z, p / p.sum()


def log_density(name, points):
    return np.asarray(jax.vmap(density(name).log_density)(jnp.asarray(points)))


def within_errors(samples, truth, sds=5.0):
    """Sample means of the columns are within some standard errors of the truth."""
    error = samples.std(0) / np.sqrt(len(samples))
    np.testing.assert_array_less(
        np.abs(samples.mean(0) - truth), sds * error + 1e-3 * np.abs(truth)
    )


def products(x):
    """The outer products of the rows, flattened."""
    return (x[:, :, None] * x[:, None, :]).reshape(len(x), -1)


def test_every_density_is_tested():
    assert {*DENSITIES, "Density"} == set(zoo.__all__)


# ------------------------------------------------------------------------------------- the paper's densities


@pytest.mark.parametrize("name", PLANES)
def test_formula_inside_the_box(x64, name):
    z = np.random.default_rng(0).uniform(-4, 4, (500, 2))
    np.testing.assert_allclose(log_density(name, z), -ref.rezende(name, z), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_box_cuts_off_smoothly(x64, name, axis, sign):
    """Beyond 4 the density falls like a Gaussian tail, and value and slope join at 4."""
    z = np.tile([0.3, 0.2], (4, 1))
    z[:, axis] = sign * np.array([4.0, 4.2, 4.6, 5.0])
    fall = 0.5 * (np.array([0.0, 0.2, 0.6, 1.0]) / 0.2) ** 2
    np.testing.assert_allclose(log_density(name, z), -ref.rezende(name, z) - fall, atol=1e-9)
    around = np.tile([0.3, 0.2], (2, 1))
    around[:, axis] = sign * np.array([4 - 1e-6, 4 + 1e-6])
    inner, outer = np.asarray(jax.vmap(jax.grad(density(name).log_density))(jnp.asarray(around)))
    np.testing.assert_allclose(inner, outer, atol=1e-3)


@pytest.mark.parametrize("name", PLANES)
def test_far_away_everything_is_finite_and_points_home(name):
    far = jnp.array([[30.0, 0.0], [-30.0, 0.0], [0.0, 30.0], [0.0, -30.0]])
    values, slopes = jax.vmap(jax.value_and_grad(density(name).log_density))(far)
    assert np.all(np.isfinite(values))
    assert np.all(values < -1000)
    assert np.all(np.sum(np.asarray(slopes) * np.asarray(far), 1) < 0)


def test_the_gradient_of_u1_is_finite_at_the_origin():
    assert np.all(np.isfinite(jax.grad(density("U1").log_density)(jnp.zeros(2))))


@pytest.mark.parametrize("name", PLANES)
def test_answers_agree_with_another_quadrature(name):
    z, p = quadrature(name)
    mean = p @ z
    covariance = (p[:, None] * (z - mean)).T @ (z - mean)
    np.testing.assert_allclose(density(name).mean, mean, atol=2e-3)
    np.testing.assert_allclose(density(name).covariance, covariance, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("U1", [lambda z: z[:, 0] < 0, lambda z: z[:, 0] > 0]),
        (
            "U2",
            [
                lambda z: z[:, 0] < -2,
                lambda z: (z[:, 0] > -2) & (z[:, 0] < 0),
                lambda z: (z[:, 0] > 0) & (z[:, 0] < 2),
                lambda z: z[:, 0] > 2,
            ],
        ),
    ],
)
def test_shares_agree_with_another_quadrature(name, inside):
    z, p = quadrature(name)
    expected = [p[where(z)].sum() for where in inside]
    np.testing.assert_allclose(density(name).shares, expected, atol=2e-3)


@pytest.mark.parametrize(("name", "stems"), [("U3", (0, 3)), ("U4", (0,))])
def test_branches_lie_above_and_below(name, stems):
    """Between the branches, moving down along z2 one passes from the upper to the lower, once."""
    z2 = np.linspace(4, -4, 400)
    region = np.asarray(density(name).region(jnp.asarray(np.stack([np.full(400, 1.2), z2], 1))))
    assert region[0] == 1
    assert region[-1] == 2
    assert np.sum(np.diff(region) != 0) == 1
    left = np.asarray(density(name).region(jnp.array([[-3.0, 0.0], [-1.0, -1.0]])))
    np.testing.assert_array_equal(left, 0)
    right = int(density(name).region(jnp.array([[3.5, 0.0]]))[0])
    assert right == (stems[1] if len(stems) > 1 else 1)


def test_u1_is_symmetric():
    np.testing.assert_allclose(density("U1").shares, 0.5, atol=1e-6)
    np.testing.assert_allclose(density("U1").mean, 0, atol=1e-6)


@pytest.mark.parametrize("name", PLANES)
def test_systematic_draws_follow_the_shares_closely(name):
    """They are exact to 1/num along the first coordinate, hence far better than independent ones."""
    z = np.asarray(density(name).systematic(jax.random.key(1), 4000))
    first, p = quadrature(name)
    levels = np.linspace(-3, 3, 13)
    expected = np.array([p[first[:, 0] < level].sum() for level in levels])
    found = np.array([np.mean(z[:, 0] < level) for level in levels])
    assert np.abs(found - expected).max() < 6e-3


# --------------------------------------------------------------------------------------------- every density


@pytest.mark.parametrize("name", DENSITIES)
def test_samples_have_the_true_mean_and_covariance(name):
    x, d = draws(name), density(name)
    assert x.shape == (NUM, d.dim)
    within_errors(x, np.asarray(d.mean))
    within_errors(products(x - d.mean), np.asarray(d.covariance).ravel())


@pytest.mark.parametrize("name", DENSITIES)
def test_samples_fit_the_log_density(name):
    """Stein's identity: E[s] = 0 and E[s (x - m)^T] = -I, which a wrong density or sampler breaks."""
    x, d = draws(name), density(name)
    score = np.asarray(jax.jit(jax.vmap(jax.grad(d.log_density)))(jnp.asarray(x, jnp.float32)))
    within_errors(score, np.zeros(d.dim))
    cross = (score[:, :, None] * (x - d.mean)[:, None, :]).reshape(NUM, -1)
    within_errors(cross, -np.eye(d.dim).ravel())


@pytest.mark.parametrize("name", DENSITIES)
def test_samples_have_the_true_shares(name):
    d = density(name)
    region = np.asarray(d.region(jnp.asarray(draws(name))))
    found = np.bincount(region, minlength=len(d.regions)) / NUM
    error = 5 * np.sqrt(d.shares * (1 - d.shares) / NUM)
    assert np.all(np.abs(found - d.shares) <= error + 2e-3)


@pytest.mark.parametrize("name", DENSITIES)
def test_regions_cover_everything(name):
    d = density(name)
    points = np.random.default_rng(1).uniform(-7, 7, (4000, d.dim))
    region = np.asarray(d.region(jnp.asarray(points)))
    assert set(region) == set(range(len(d.regions)))
    assert len(d.shares) == len(d.regions)
    np.testing.assert_allclose(d.shares.sum(), 1, atol=1e-9)
    assert np.all(d.shares > 0)


@pytest.mark.parametrize("name", DENSITIES)
def test_draws_depend_on_the_key_alone(name):
    one, same, other = (density(name).sample(jax.random.key(k), 50) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)


# ------------------------------------------------------------------------------------------ the classic ones


def up_to_a_constant(found, expected):
    difference = np.asarray(found) - np.asarray(expected)
    np.testing.assert_allclose(difference, difference[0], rtol=1e-9, atol=1e-9)


def test_gaussian_log_density(x64):
    d, x = density("Gaussian"), ref.cloud(20, 2)
    expected = stats.multivariate_normal([1.0, -2.0], [[2.0, 0.6], [0.6, 0.5]]).logpdf(x)
    up_to_a_constant(jax.vmap(d.log_density)(jnp.asarray(x)), expected)


def test_mixture_log_density(x64):
    d, x = density("GaussianMixture"), ref.cloud(20, 2)
    parts = [
        w * stats.multivariate_normal(m, s**2 * np.eye(2)).pdf(x)
        for w, m, s in zip([1, 2, 3], d.means, [0.5, 1.0, 0.7], strict=True)
    ]
    up_to_a_constant(jax.vmap(d.log_density)(jnp.asarray(x)), np.log(sum(parts)))


def test_mixture_shares_are_near_the_weights_of_distant_components():
    d = zoo.GaussianMixture([[-9.0], [9.0]], sds=0.5, weights=[0.3, 0.7])
    np.testing.assert_allclose(d.shares, [0.3, 0.7], atol=5e-3)


def test_banana_log_density(x64):
    d, x = zoo.Banana(sd=1.5, bend=0.4), ref.cloud(20, 2)
    expected = stats.norm(0, 1.5).logpdf(x[:, 0])
    expected = expected + stats.norm(0.4 * (x[:, 0] ** 2 - 1.5**2), 1).logpdf(x[:, 1])
    up_to_a_constant(jax.vmap(d.log_density)(jnp.asarray(x)), expected)


def test_funnel_log_density(x64):
    d, x = zoo.Funnel(dim=4, sd=3.0), ref.cloud(20, 4)
    expected = stats.norm(0, 3).logpdf(x[:, 0])
    expected = expected + stats.norm(0, np.exp(x[:, :1] / 2)).logpdf(x[:, 1:]).sum(1)
    up_to_a_constant(jax.vmap(d.log_density)(jnp.asarray(x)), expected)


def test_funnel_covariance_by_quadrature():
    d = zoo.Funnel(dim=3, sd=1.5)
    variance, _ = integrate.quad(lambda v: np.exp(v) * stats.norm(0, 1.5).pdf(v), -15, 20)
    np.testing.assert_allclose(np.diag(d.covariance), [1.5**2, variance, variance], rtol=1e-6)


def test_log_gamma(x64):
    d, x = zoo.LogGamma(shape=3.5, dim=2), ref.cloud(20, 2)
    expected = stats.loggamma(3.5).logpdf(x).sum(1)
    up_to_a_constant(jax.vmap(d.log_density)(jnp.asarray(x)), expected)
    np.testing.assert_allclose(d.mean, special.digamma(3.5), rtol=1e-9)
    np.testing.assert_allclose(d.covariance, special.polygamma(1, 3.5) * np.eye(2), rtol=1e-9)


def test_a_covariance_of_the_wrong_shape_is_refused():
    with pytest.raises(OptionError, match="covariance"):
        zoo.Gaussian([0.0, 0.0], [[1.0]])
