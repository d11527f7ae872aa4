"""Calibration by linear and by kernel test functions, and the flow for few particles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax.calibration import calibrated, matched
from particlax.diffusions import GFSD, Blob, Transport
from particlax.errors import NonFiniteError, OptionError, ParticleError
from particlax.metrics import Ensemble

from . import references as ref


def settling(steps, first=0.1):
    return optax.piecewise_constant_schedule(
        first, {int(0.6 * steps): 0.3, int(0.85 * steps): 0.33}
    )


def at_rest(flow, start, steps):
    cloud = px.run(flow, start, steps=steps, key=jax.random.key(0), progress=False).particles
    return np.asarray(cloud, float)


@pytest.mark.parametrize("kind", ["array", "tree"])
@pytest.mark.parametrize("dim", [3, 12])
def test_matched_solves_the_regression(x64, dim, kind):
    x = ref.cloud(30, dim, spread=3.0, centre=2.0)
    t = np.sin(x) + 0.3 * x
    as_jax = lambda a: jax.tree.map(jnp.asarray, ref.layout(a, kind))
    got = ref.matrix_of(matched(as_jax(t), as_jax(x)))
    np.testing.assert_allclose(got, ref.matched(t, x), rtol=1e-6, atol=1e-7)


def test_matched_satisfies_stein_for_linear_functions_exactly_and_for_smooth_ones_nearly(x64):
    """On a skewed cloud the linear calibration breaks E[t phi] = E[phi'] for phi = sin; matched keeps it."""
    x = jax.random.loggamma(jax.random.key(0), 1.0, (200, 1))
    base = jnp.tanh(x)
    phi, slope = jnp.sin(0.7 * x), 0.7 * jnp.cos(0.7 * x)
    for function in (calibrated, matched):
        t = function(base, x)
        assert abs(float(jnp.mean(t))) < 1e-10
        assert abs(float(jnp.mean(t * (x - x.mean()))) - 1) < 1e-10
    gaps = [abs(float(jnp.mean(f(base, x) * phi - slope))) for f in (calibrated, matched)]
    assert gaps[1] < 0.01 < gaps[0]


def test_matched_moves_with_affine_maps(x64):
    rng = np.random.default_rng(0)
    x, t = ref.cloud(40, 3), np.sin(ref.cloud(40, 3, seed=1))
    A, b = rng.normal(size=(3, 3)) + 2 * np.eye(3), rng.normal(size=3)
    inverse = np.linalg.inv(A)
    moved = matched(jnp.asarray(t @ inverse), jnp.asarray(x @ A.T + b))
    np.testing.assert_allclose(moved, matched(jnp.asarray(t), jnp.asarray(x)) @ inverse, atol=1e-8)


def test_matched_in_float32_is_near_float64():
    x = ref.cloud(60, 4, spread=0.01, centre=1.0).astype(np.float32)
    t = np.sin(100 * x)
    got = matched(jnp.asarray(t), jnp.asarray(x))
    assert got.dtype == jnp.float32
    want = ref.matched(np.asarray(t, float), np.asarray(x, float))
    assert np.abs(np.asarray(got, float) - want).max() < 2e-5 * np.abs(want).max()


@pytest.mark.parametrize(("num", "dim"), [(40, 2), (100, 5)])
def test_rounding_does_not_come_back_larger(num, dim):
    """Its matrices are solved in float64: in float32, 1e-7 of a cloud moved the force by a hundredth."""
    x = ref.cloud(num, dim).astype(np.float32)
    moved = x * (1 + 1e-7 * np.random.default_rng(0).normal(size=x.shape)).astype(np.float32)
    there, here = (np.asarray(jax.jit(matched)(jnp.tanh(a), a)) for a in (x, moved))
    assert 0 < np.abs(there - here).max() < 5e-5 * np.abs(here).max()


@pytest.mark.parametrize("base", [Blob, GFSD, Transport])
def test_few_particles_have_the_moments_of_an_ill_conditioned_gaussian(x64, base):
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(10, 10)))[0]
    truth = rotation @ np.diag(np.geomspace(1, 1e6, 10)) @ rotation.T
    density = px.zoo.Gaussian(np.arange(10.0), truth)
    start = 3 * density.sample(jax.random.key(1), 30)
    flow = px.calibrated(
        px.Target(density.log_density),
        diffusion=base(calibrate="matched"),
        step_size=settling(1500),
    )
    cloud = at_rest(flow, start, 1500)
    root = np.linalg.inv(np.linalg.cholesky(truth))
    np.testing.assert_allclose(root @ (cloud.mean(0) - density.mean), 0, atol=1e-4)
    np.testing.assert_allclose(root @ np.cov(cloud.T, bias=True) @ root.T, np.eye(10), atol=1e-3)


def test_the_safeguard_keeps_a_skewed_target_where_linear_calibration_spreads_it():
    density = px.zoo.LogGamma(1.0, dim=5)
    target, start = px.Target(density.log_density), jax.random.normal(jax.random.key(2), (50, 5))
    truth = np.sqrt(np.diag(density.covariance))
    sds = {}
    for kind in (True, "matched"):
        flow = px.calibrated(target, diffusion=Blob(calibrate=kind), step_size=settling(1500))
        cloud = at_rest(flow, start, 1500)
        sds[kind] = cloud.std(0) / truth
        if kind == "matched":
            np.testing.assert_allclose(cloud.mean(0), density.mean, atol=0.04)
    assert np.all(np.abs(sds["matched"] - 1) < 0.04)
    assert np.all(sds[True] > 1.3)


def test_the_limit_survives_a_start_a_hundred_times_too_wide(x64):
    density = px.zoo.LogGamma(2.0, dim=3)
    start = 100 * jax.random.normal(jax.random.key(3), (40, 3))
    target = px.Target(density.log_density)
    cloud = at_rest(px.calibrated(target, step_size=settling(2000)), start, 2000)
    ratio = cloud.std(0) / np.sqrt(np.diag(density.covariance))
    assert np.all(np.abs(ratio - 1) < 0.05)
    loose = px.w_sgld_b(target, calibrate="matched", metric=Ensemble(), step_size=0.1)
    with pytest.raises(NonFiniteError):
        at_rest(loose, start, 2000)


def test_the_limit_bounds_the_speed_in_units_of_the_cloud(x64, key):
    x = jnp.asarray(ref.cloud(30, 3, spread=5.0))
    flow = px.w_sgld_b(px.Target(lambda v: -1e6 * v @ v), metric=Ensemble(limit=0.5), step_size=1.0)
    moved = flow.step(key, flow.init(x))[0].particles
    root = np.linalg.inv(np.linalg.cholesky(np.cov(x.T, bias=True)))
    speed = np.linalg.norm(np.asarray(moved - x) @ root.T, axis=1)
    np.testing.assert_allclose(speed, 0.5 * np.sqrt(3), rtol=1e-6)


@pytest.mark.parametrize("value", ["safe", 1, None])
def test_an_unknown_calibration_is_named(value):
    with pytest.raises(OptionError, match="matched"):
        Blob(calibrate=value)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_must_be_positive(limit):
    with pytest.raises(OptionError, match="limit"):
        Ensemble(limit=limit)


def test_too_few_particles_to_match():
    flow = px.w_sgld_b(px.Target(lambda v: -v @ v), calibrate="matched", step_size=0.1)
    with pytest.raises(ParticleError, match="at least 5 particles"):
        flow.init(jnp.asarray(ref.cloud(4, 3)))
    flow.init(jnp.asarray(ref.cloud(5, 3)))


def test_the_flow_wants_a_force():
    with pytest.raises(OptionError, match="Force"):
        px.calibrated(px.Target(lambda v: -v @ v), diffusion=px.diffusions.Langevin())
