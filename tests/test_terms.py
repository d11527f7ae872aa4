"""Drift and Stein against NumPy double loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax.errors import OptionError, ParticleError
from particlax.terms import Cloud, Frame, Velocity, add

from . import references as ref

K = px.kernels
LAYOUTS = [(3, "array"), (3, "tree"), (12, "array"), (12, "tree")]
PROFILES = {
    "RBF": (K.RBF, ref.rbf),
    "IMQ": (K.IMQ, ref.imq),
    "Laplace": (K.Laplace, ref.laplace),
    "Mixture": (K.Mixture, ref.mixture),
}


def make_cloud(x, score, kind="array", step=0):
    points, scores = (jax.tree.map(jnp.asarray, ref.layout(a, kind)) for a in (x, score))
    return Cloud(x=points, score=scores, step=jnp.int32(step), frame=Frame(), raw=points)


def velocity(term, cloud, jit=False):
    call = lambda cloud: term(cloud, None, term.init(cloud.x))[0]
    return (jax.jit(call) if jit else call)(cloud)


def test_many_particles_of_16_bits(key):
    """A sum over 2000 scores of 100 is too large for float16; their mean is not."""
    x = jnp.asarray(ref.cloud(2000, 2), jnp.float16)
    cloud = make_cloud(x, jnp.full_like(x, 100))
    drift, _ = velocity(px.Stein(kernel=K.RBF(bandwidth=1e4)), cloud, jit=True)
    assert drift.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(drift, float), 100, rtol=0.01)
    target = px.Target(lambda x: 100 * jnp.sum(x.astype(jnp.float32)))
    flow = px.Flow(target, (px.Drift(),), px.integrators.Euler(1e-3))
    forces = flow.step(key, flow.init(x))[1].forces
    np.testing.assert_allclose(forces["Drift"], np.sqrt(2) * 100, rtol=1e-3)


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_drift_is_the_weighted_score(x64, dim, kind):
    x, score = ref.cloud(6, dim), ref.cloud(6, dim, seed=1)
    drift, noise = velocity(px.Drift(0.3), make_cloud(x, score, kind))
    np.testing.assert_allclose(ref.matrix_of(drift), 0.3 * score, rtol=1e-14)
    assert noise is None


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
@pytest.mark.parametrize("name", PROFILES)
def test_stein_equals_the_double_loop(x64, name, dim, kind):
    kernel, profile = PROFILES[name]
    x, score, h = ref.cloud(9, dim), ref.cloud(9, dim, seed=1), 0.9 * dim
    term = px.Stein(0.7, kernel(bandwidth=h))
    drift, noise = velocity(term, make_cloud(x, score, kind))
    expected = 0.7 * ref.stein(x, score, h, profile)
    np.testing.assert_allclose(ref.matrix_of(drift), expected, rtol=1e-10, atol=1e-10)
    assert noise is None


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_stein_with_the_papers_bandwidth(x64, dim, kind, jit):
    x, score = ref.cloud(20, dim), ref.cloud(20, dim, seed=1)
    drift, _ = velocity(px.Stein(), make_cloud(x, score, kind), jit=jit)
    expected = ref.stein(x, score, ref.median_bandwidth(x))
    np.testing.assert_allclose(ref.matrix_of(drift), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", PROFILES)
def test_stein_of_one_particle_is_its_score(x64, name):
    x, score = ref.cloud(1, 3), ref.cloud(1, 3, seed=1)
    term = px.Stein(kernel=PROFILES[name][0](bandwidth=0.4))
    np.testing.assert_allclose(velocity(term, make_cloud(x, score)).drift, score, rtol=1e-14)


def test_stein_pushes_two_particles_apart(x64):
    x = np.array([[0.0], [1.0]])
    drift = velocity(px.Stein(kernel=K.RBF(1.0)), make_cloud(x, np.zeros((2, 1)))).drift
    np.testing.assert_allclose(drift, [[-np.exp(-1)], [np.exp(-1)]], rtol=1e-14)


def test_stein_ascends_the_density():
    """Far from the mode and close together, the whole cloud must move along the score."""
    x = 5 + ref.cloud(8, 2, spread=0.1)
    drift = velocity(px.Stein(kernel=K.RBF(1.0)), make_cloud(x, -x)).drift
    assert np.all(np.mean(drift, 0) < -3)


@pytest.mark.parametrize("term", [px.Drift, px.Stein])
def test_weights_may_be_schedules(x64, term):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    x, score = ref.cloud(5, 3), ref.cloud(5, 3, seed=1)
    options = {} if term is px.Drift else {"kernel": K.RBF(1.0)}
    full = velocity(term(1.0, **options), make_cloud(x, score)).drift
    part = velocity(term(schedule, **options), make_cloud(x, score, step=7)).drift
    np.testing.assert_allclose(part, 0.3 * np.asarray(full), rtol=1e-6)


@pytest.mark.parametrize("term", [px.Drift, px.Stein])
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused(term, weight):
    with pytest.raises(OptionError, match="weight"):
        term(weight)


@pytest.mark.parametrize("num", [1, 3])
def test_stein_refuses_clouds_without_distances(num):
    with pytest.raises(ParticleError):
        px.Stein().check(jnp.ones((num, 2)))


def test_a_fixed_bandwidth_takes_one_particle():
    px.Stein(kernel=K.RBF(1.0)).check(jnp.ones((1, 2)))
    flow = px.svgd(px.Target(lambda x: -0.5 * x @ x), kernel=K.RBF(1.0), step_size=0.5)
    state, _ = flow.step(jax.random.key(0), flow.init(jnp.ones((1, 2))))
    np.testing.assert_allclose(state.particles, 0.5, rtol=1e-6)


def test_add_ignores_none():
    assert add(None, None) is None
    np.testing.assert_array_equal(add(None, jnp.ones(2), jnp.ones(2)), [2.0, 2.0])


def test_velocity_without_noise():
    assert Velocity(jnp.ones(2)).noise is None
