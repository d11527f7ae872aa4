"""Metrics: frames, noise, the correction of noise, and affine invariance of whole samplers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax.errors import OptionError, ParticleError

from . import references as ref

COMPILE_FAST = True

METRICS = {"Diagonal": px.metrics.Diagonal(), "Ensemble": px.metrics.Ensemble()}
LAYOUTS = [(3, "array"), (3, "tree"), (12, "array"), (12, "tree")]


def as_jax(matrix, kind="array"):
    return jax.tree.map(jnp.asarray, ref.layout(matrix, kind))


def covariance(x, name="Ensemble"):
    """D by its definition, with 1/M."""
    m, C = x.mean(0), np.zeros((x.shape[1], x.shape[1]))
    for row in x:
        C += np.outer(row - m, row - m) / len(x)
    return np.diag(np.diag(C)) if name == "Diagonal" else C


def factor(frame, num, dim, kind):
    """L, read off from what `back` makes of unit vectors."""
    units = np.zeros((num, dim))
    units[:dim] = np.eye(dim)
    like = frame.points(as_jax(units, kind))  # for its structure only
    velocity = as_jax(units, "array" if isinstance(like, jax.Array) else kind)
    return ref.matrix_of(frame.back(velocity))[:dim].T


def close(left, right, tolerance=1e-10):
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("place,width", [(1e4, 1.0), (1e4, 0.01), (1e5, 1.0)])
@pytest.mark.parametrize("name", METRICS)
def test_coordinates_of_a_cloud_far_from_the_origin(name, place, width):
    """In float32: the mean of the cloud's own coordinates is zero, and they are those of float64."""
    x = (place + width * ref.cloud(50, 3)).astype(np.float32)
    z = METRICS[name].frame(jnp.asarray(x)).points(jnp.asarray(x))
    wide = x.astype(np.float64) - x.astype(np.float64).mean(0)
    truth = wide / wide.std(0)
    if name == "Ensemble":
        truth = np.linalg.solve(np.linalg.cholesky(covariance(wide)), wide.T).T
    np.testing.assert_allclose(np.abs(z), np.abs(truth), atol=3e-6)
    assert np.abs(np.mean(z, 0)).max() < 1e-6


def test_identity_changes_nothing(key):
    x = jnp.asarray(ref.cloud(5, 3))
    frame = px.metrics.Identity().frame(x)
    assert frame.points(x) is x
    assert frame.scores(x) is x
    assert frame.back(x) is x
    assert frame.correction(x) is None


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
@pytest.mark.parametrize("name", METRICS)
def test_frame(x64, name, dim, kind):
    """L L^T = D, z = L^-1 (x - m), scores L^T s, and back gives L v."""
    x, score, other = (ref.cloud(20, dim, seed=s) for s in range(3))
    frame = METRICS[name].frame(as_jax(x, kind))
    L = factor(frame, 20, dim, kind)
    close(L @ L.T, covariance(x, name))
    inverse, m = np.linalg.inv(L), x.mean(0)
    close(ref.matrix_of(frame.points(as_jax(x, kind))), (x - m) @ inverse.T)
    close(ref.matrix_of(frame.points(as_jax(other, kind))), (other - m) @ inverse.T)
    close(ref.matrix_of(frame.scores(as_jax(score, kind))), score @ L)


@pytest.mark.parametrize("kind", ["array", "tree"])
@pytest.mark.parametrize("name", METRICS)
def test_back_has_the_structure_of_the_particles(x64, name, kind):
    x = as_jax(ref.cloud(20, 12), kind)
    frame = METRICS[name].frame(x)
    back = frame.back(frame.points(x))
    assert jax.tree.structure(back) == jax.tree.structure(x)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, x)


@pytest.mark.parametrize("shortcut", [True, False])
def test_points_of_the_cloud_itself_are_white(x64, shortcut):
    x = jnp.asarray(ref.cloud(20, 3) * [1.0, 1e3, 1e-3])
    z = np.asarray(px.metrics.Ensemble().frame(x).points(x if shortcut else x + 0))
    close(z.T @ z / 20, np.eye(3))
    close(z.mean(0), np.zeros(3))


@pytest.mark.parametrize("kind", ["array", "tree"])
@pytest.mark.parametrize("name", METRICS)
def test_noise_has_covariance_d_and_particles_are_independent(name, kind):
    """Monte Carlo over keys, every particle for itself."""
    x, draws = ref.cloud(6, 3), 20000
    cloud = as_jax(x.astype(np.float32), kind)
    frame = METRICS[name].frame(cloud)
    points = frame.points(cloud)
    keys = jax.random.split(jax.random.key(3), draws)
    noise = jax.jit(jax.vmap(lambda k: frame.back(frame.normal(k, points))))(keys)
    leaves = [noise[k] for k in sorted(noise)] if isinstance(noise, dict) else [noise]
    noise = np.concatenate([np.asarray(v, float).reshape(draws, 6, -1) for v in leaves], 2)
    D = covariance(x, name)
    scale = np.sqrt(np.outer(np.diag(D), np.diag(D)))
    tolerance = 5 * np.sqrt(2 / draws)
    for i in range(6):
        own = noise[:, i].T @ noise[:, i] / draws
        assert np.abs((own - D) / scale).max() < tolerance
        other = noise[:, i].T @ noise[:, (i + 1) % 6] / draws
        assert np.abs(other / scale).max() < tolerance


@pytest.mark.parametrize("kind", ["array", "tree"])
@pytest.mark.parametrize("name", METRICS)
def test_correction_is_the_divergence_of_d(x64, name, kind):
    """In x: sum_e d D_de / d x_ie, by central differences of the covariance."""
    x, step = ref.cloud(7, 3), 1e-5
    expected = np.zeros_like(x)
    for i in range(7):
        for e in range(3):
            up, down = x.copy(), x.copy()
            up[i, e] += step
            down[i, e] -= step
            expected[i] += (covariance(up, name) - covariance(down, name))[:, e] / (2 * step)
    cloud = as_jax(x, kind)
    frame = METRICS[name].frame(cloud)
    correction = frame.back(frame.correction(frame.points(cloud)))
    close(ref.matrix_of(correction), expected, 1e-8)


@pytest.mark.parametrize(("name", "factor"), [("Diagonal", 2), ("Ensemble", 4)])
def test_langevin_adds_the_correction_times_its_weight(x64, name, factor):
    x = jnp.asarray(ref.cloud(7, 3))
    flat = px.Target(lambda x: 0.0 * jnp.sum(x))
    term = px.diffusions.Langevin(0.5)
    flow = px.Flow(flat, (px.Drift(), term), px.integrators.Euler(1.0), METRICS[name])
    state, _ = flow.step(jax.random.key(0), flow.init(x))
    still = px.Flow(flat, (px.Drift(), term), px.integrators.Euler(0.25), METRICS[name])
    other, _ = still.step(jax.random.key(0), still.init(x))
    # x + eps d + sqrt(eps) n for eps = 1 and 1/4: two equations, d is their solution
    drift = 2 * (state.particles - x) - 4 * (other.particles - x)
    close(drift, 0.5 * factor / 7 * np.asarray(x - x.mean(0)))


# ---------------------------------------------------------------------------------------- affine invariance


A = np.array([[2.0, 0.5, 0.0], [-1.0, 30.0, 4.0], [0.3, 0.0, 0.05]])
B = np.array([5.0, -7.0, 100.0])


def log_density(x):
    return -0.5 * jnp.sum(x**2) - 0.1 * jnp.sum((x - 1) ** 4) + jnp.sin(x[0] * x[1])


def samplers():
    kernel, metric = px.kernels.RBF(), px.metrics.Ensemble()
    langevin = px.diffusions.Langevin()
    return {
        "svgd": lambda t: px.svgd(t, step_size=0.1, kernel=kernel, metric=metric),
        "svgd IMQ": lambda t: px.svgd(t, step_size=0.1, kernel=px.kernels.IMQ(), metric=metric),
        "w_sgld_b": lambda t: px.w_sgld_b(t, step_size=0.05, metric=metric),
        "calibrated blob": lambda t: px.w_sgld_b(t, step_size=0.05, calibrate=True, metric=metric),
        "w_sgld fixed scale": lambda t: px.w_sgld(
            t, step_size=0.05, coupling=px.diffusions.FixedScale(0.05), metric=metric
        ),
        "w_sgld fixed scale, JKO steps": lambda t: px.w_sgld(
            t, step_size=0.05, coupling=px.diffusions.FixedScale(0.05), inner=4, metric=metric
        ),
        "w_sgld sinkhorn": lambda t: px.w_sgld(
            t,
            step_size=0.05,
            coupling=px.diffusions.Sinkhorn(iterations=20, tolerance=0.0),
            inner=3,
            metric=metric,
        ),
        "w_sgld envelope": lambda t: px.w_sgld(
            t,
            step_size=0.05,
            coupling=px.diffusions.Sinkhorn(derivative="envelope", iterations=20, tolerance=0.0),
            inner=3,
            metric=metric,
        ),
        "sgld": lambda t: px.sgld(t, step_size=0.02, metric=metric),
        "sghmc": lambda t: px.sghmc(t, step_size=0.05, metric=metric),
        "pi_sgld with noise": lambda t: px.pi_sgld(
            t, step_size=0.02, diffusion=langevin, metric=metric
        ),
    }


def after(flow, x, steps=20):
    key = jax.random.key(11)
    move = lambda state, _: (flow.step(key, state)[0], None)
    state, _ = jax.jit(lambda s: jax.lax.scan(move, s, None, length=steps))(flow.init(x))
    return np.asarray(state.particles)


def both_ways(make, x):
    """The cloud moved in x then mapped, and mapped then moved."""
    inverse = np.linalg.inv(A)
    straight = after(make(px.Target(log_density)), jnp.asarray(x))
    mapped = px.Target(lambda y: log_density(jnp.asarray(inverse) @ (y - B)))
    around = after(make(mapped), jnp.asarray(x @ A.T + B))
    return straight, straight @ A.T + B, around


@pytest.mark.parametrize("name", samplers())
def test_ensemble_samplers_are_affine_invariant(x64, name):
    x = ref.cloud(16, 3)
    straight, expected, around = both_ways(samplers()[name], x)
    assert np.all(np.isfinite(straight))
    assert np.abs(straight - x).max() > 0.1  # something moved
    np.testing.assert_allclose(around, expected, rtol=1e-8, atol=1e-8)


def test_without_the_metric_svgd_is_not_affine_invariant(x64):
    make = lambda target: px.svgd(target, step_size=1e-3)
    _, expected, around = both_ways(make, ref.cloud(16, 3))
    assert np.abs(around - expected).max() > 1e-3


@pytest.mark.parametrize("make", [px.w_sgld_b, px.svgd])
def test_diagonal_samplers_are_invariant_under_scalings_and_shifts(x64, make):
    x, scales = ref.cloud(16, 3), np.array([1.0, 1e3, 1e-2])
    metric = px.metrics.Diagonal()
    straight = after(make(px.Target(log_density), step_size=0.05, metric=metric), jnp.asarray(x))
    mapped = px.Target(lambda y: log_density((y - B) / scales))
    around = after(make(mapped, step_size=0.05, metric=metric), jnp.asarray(x * scales + B))
    np.testing.assert_allclose((around - B) / scales, straight, rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("name", "needed"), [("Diagonal", 2), ("Ensemble", 5)])
def test_too_few_particles_are_refused(name, needed):
    metric = METRICS[name]
    metric.check(jnp.asarray(ref.cloud(needed, 3)))
    with pytest.raises(ParticleError, match=name):
        metric.check(jnp.asarray(ref.cloud(needed - 1, 3)))


def test_elementwise_noise_is_refused_in_the_ensemble_metric():
    target = px.Target(lambda x: -0.5 * x @ x)
    with pytest.raises(OptionError, match="Ensemble"):
        px.sgld(target, integrator=px.integrators.RMS(0.1), metric=px.metrics.Ensemble())


def test_a_coordinate_without_spread_stays_finite():
    x = jnp.asarray(ref.cloud(6, 3)).at[:, 1].set(2.0)
    frame = px.metrics.Diagonal().frame(x)
    z = frame.points(x)
    assert np.all(np.isfinite(z))
    np.testing.assert_array_equal(z[:, 1], 0)
