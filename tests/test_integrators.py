"""Integrators against loops written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax.errors import OptionError
from particlax.terms import Velocity

from . import references as ref

STEPS, NUM, DIM = 5, 6, 3


def sequence(seed):
    """One matrix for every step."""
    return [ref.cloud(NUM, DIM, seed=100 * seed + t) for t in range(STEPS)]


def as_jax(matrix, kind="array"):
    return jax.tree.map(jnp.asarray, ref.layout(matrix, kind))


def integrate(integrator, x, drifts, noises=None, kind="array"):
    """The clouds that the library visits."""
    cloud, visited = as_jax(x, kind), []
    memory = integrator.init(cloud)
    for t, drift in enumerate(drifts):
        noise = None if noises is None else as_jax(noises[t], kind)
        velocity = Velocity(as_jax(drift, kind), noise)
        cloud, memory = integrator.step(cloud, velocity, memory, jnp.int32(t))
        visited.append(ref.matrix_of(cloud))
    return visited


def close(left, right, tolerance=1e-12):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def sizes(schedule):
    return [0.1 * (1 + t) ** -0.55 for t in range(STEPS)] if schedule else [0.1] * STEPS


def step_size(schedule):
    return px.schedules.polynomial(0.1) if schedule else 0.1


BOTH = pytest.mark.parametrize("schedule", [False, True], ids=["constant", "schedule"])
KINDS = pytest.mark.parametrize("kind", ["array", "tree"])
NOISE = pytest.mark.parametrize("noisy", [False, True], ids=["still", "noisy"])


@BOTH
@KINDS
@NOISE
def test_euler(x64, schedule, kind, noisy):
    x, drifts, noises = ref.cloud(NUM, DIM), sequence(1), sequence(2) if noisy else None
    expected, here = [], x
    for t, eps in enumerate(sizes(schedule)):
        here = here + eps * drifts[t] + (np.sqrt(eps) * noises[t] if noisy else 0)
        expected.append(here)
    close(integrate(px.integrators.Euler(step_size(schedule)), x, drifts, noises, kind), expected)


@BOTH
@KINDS
@NOISE
def test_rms(x64, schedule, kind, noisy):
    x, drifts, noises = ref.cloud(NUM, DIM), sequence(1), sequence(2) if noisy else None
    expected, here, V = [], x, np.zeros_like(x)
    for t, eps in enumerate(sizes(schedule)):
        V = 0.9 * V + 0.1 * drifts[t] ** 2
        G = 1 / (1e-3 + np.sqrt(V))
        here = here + eps * G * drifts[t] + (np.sqrt(eps * G) * noises[t] if noisy else 0)
        expected.append(here)
    rms = px.integrators.RMS(step_size(schedule), decay=0.9, epsilon=1e-3)
    close(integrate(rms, x, drifts, noises, kind), expected)


@BOTH
@KINDS
@NOISE
def test_momentum_is_baoa(x64, schedule, kind, noisy):
    """Kick, half a move, friction and noise, half a move; noise per unit of friction is `noise`."""
    x, drifts, noises = ref.cloud(NUM, DIM), sequence(1), sequence(2) if noisy else None
    friction, expected, here, q = 1.5, [], x, np.zeros_like(x)
    for t, eps in enumerate(sizes(schedule)):
        q = q + eps * drifts[t]
        here = here + eps / 2 * q
        c = np.exp(-friction * eps)
        # dq = -friction q dt + sqrt(friction) noise over eps: variance (1 - c^2) / 2 per unit of noise
        q = c * q + (np.sqrt((1 - c**2) / 2) * noises[t] if noisy else 0)
        here = here + eps / 2 * q
        expected.append(here)
    momentum = px.integrators.Momentum(step_size(schedule), friction)
    close(integrate(momentum, x, drifts, noises, kind), expected)


@KINDS
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.adagrad(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.1),
    ],
    ids=["adam", "adagrad", "sgd", "adamw with schedule"],
)
def test_optax(x64, optimizer, kind):
    x, drifts = ref.cloud(NUM, DIM), sequence(1)
    here, expected = jnp.asarray(x), []
    memory = optimizer.init(here)
    for drift in drifts:
        updates, memory = optimizer.update(-jnp.asarray(drift), memory, here)
        here = here + updates
        expected.append(np.asarray(here))
    close(integrate(px.integrators.Optax(optimizer), x, drifts, kind=kind), expected)


def test_optax_ascends(x64):
    x, drift = np.zeros((NUM, DIM)), np.ones((NUM, DIM))
    visited = integrate(px.integrators.Optax(optax.sgd(0.5)), x, [drift])
    close(visited, [0.5 * drift])


def test_adagrad_by_hand(x64):
    """Not a loop over optax itself: the update of the SVGD papers, written out."""
    x, drifts = ref.cloud(NUM, DIM), sequence(1)
    optimizer = optax.adagrad(0.1, initial_accumulator_value=0.0, eps=1e-7)
    here, total, expected = x, np.zeros_like(x), []
    for drift in drifts:
        total = total + drift**2
        here = here + 0.1 * drift / np.sqrt(total + 1e-7)
        expected.append(here)
    close(integrate(px.integrators.Optax(optimizer), x, drifts), expected, 1e-6)


# ------------------------------------------------------------------------------------------- whole samplers


def log_density(x):
    return -0.5 * jnp.sum(x**2 * jnp.array([1.0, 4.0, 0.25])) - 0.1 * jnp.sum(x**4)


def score(x):
    return -x * np.array([1.0, 4.0, 0.25]) - 0.4 * x**3


def path(flow, x, key, steps=STEPS):
    state, clouds = flow.init(jnp.asarray(x)), [np.asarray(x)]
    step = jax.jit(flow.step)
    for _ in range(steps):
        state, _ = step(key, state)
        clouds.append(np.asarray(state.particles))
    return clouds


def normals(x, key):
    """The standard normals of sgld with this key: on a flat target, steps of 1/2 are sqrt(1/2) sqrt(2) xi."""
    flat = px.Target(lambda x: 0.0 * jnp.sum(x))
    return np.diff(path(px.sgld(flat, step_size=0.5), np.zeros_like(x), key), axis=0)


def test_sgld_by_hand(x64, key):
    x, eps = ref.cloud(NUM, DIM), 0.05
    expected = [x]
    for xi in normals(x, key):
        here = expected[-1]
        expected.append(here + eps * score(here) + np.sqrt(2 * eps) * xi)
    close(path(px.sgld(px.Target(log_density), step_size=eps), x, key), expected, 1e-10)


def test_psgld_by_hand(x64, key):
    """V = a V + (1 - a) g^2, G = 1 / (eps + sqrt V), x += e G s + sqrt(2 e G) xi (Li et al. 2016)."""
    x, e, a = ref.cloud(NUM, DIM), 0.05, 0.99
    expected, V = [x], np.zeros_like(x)
    for xi in normals(x, key):
        here = expected[-1]
        g = score(here)
        V = a * V + (1 - a) * g**2
        G = 1 / (1e-5 + np.sqrt(V))
        expected.append(here + e * G * g + np.sqrt(2 * e * G) * xi)
    flow = px.sgld(px.Target(log_density), integrator=px.integrators.RMS(e, decay=a))
    close(path(flow, x, key), expected, 1e-10)


def test_sghmc_by_hand(x64, key):
    x, eps, friction = ref.cloud(NUM, DIM), 0.1, 2.0
    expected, q, c = [x], np.zeros_like(x), np.exp(-2.0 * 0.1)
    for xi in normals(x, key):
        here = expected[-1]
        q = q + eps * score(here)
        here = here + eps / 2 * q
        q = c * q + np.sqrt(1 - c**2) * xi
        expected.append(here + eps / 2 * q)
    flow = px.sghmc(px.Target(log_density), step_size=eps, friction=friction)
    close(path(flow, x, key), expected, 1e-10)


def test_the_normals_are_standard_and_fresh(key):
    xi = normals(np.zeros((2000, DIM), np.float32), key).reshape(STEPS, -1)
    np.testing.assert_allclose(xi.var(1), 1, atol=5 * np.sqrt(2 / 6000))
    assert np.abs(np.corrcoef(xi) - np.eye(STEPS)).max() < 5 / np.sqrt(6000)


@pytest.mark.parametrize("eps", [0.1, 0.8])
def test_momentum_has_exact_positions_on_a_gaussian(x64, eps):
    """Stationary covariance of the linear chain that one step makes on N(0, 1 / precision)."""
    precision, momentum = 1.7, px.integrators.Momentum(eps, friction=0.9)

    def move(x, q, xi):
        drift, noise = jnp.full((1, 1), -precision * x), jnp.full((1, 1), np.sqrt(2) * xi)
        velocity = Velocity(drift, noise)
        moved, memory = momentum.step(
            jnp.full((1, 1), x), velocity, {"momentum": jnp.full((1, 1), q)}, jnp.int32(0)
        )
        return np.array([float(moved[0, 0]), float(memory["momentum"][0, 0])])

    T = np.stack([move(1.0, 0.0, 0.0), move(0.0, 1.0, 0.0)], 1)
    n = move(0.0, 0.0, 1.0)
    S = np.linalg.solve(np.eye(4) - np.kron(T, T), np.outer(n, n).ravel()).reshape(2, 2)
    np.testing.assert_allclose(S[0, 0], 1 / precision, rtol=1e-10)


def test_euler_is_biased_on_a_gaussian_as_known(x64):
    """The same measure for Euler-Maruyama is 1 / (precision (1 - eps precision / 2))."""
    eps, precision, euler = 0.3, 1.7, px.integrators.Euler(0.3)
    step = lambda d, n: float(
        euler.step(jnp.ones((1, 1)), Velocity(jnp.full((1, 1), d), n), (), jnp.int32(0))[0][0, 0]
    )
    T = step(-precision, None)
    n2 = (step(0.0, jnp.full((1, 1), np.sqrt(2.0))) - 1) ** 2
    np.testing.assert_allclose(n2 / (1 - T**2), 1 / (precision * (1 - eps * precision / 2)))


# ------------------------------------------------------------------------------------------------- refusals


def test_noise_never_passes_through_an_optimiser():
    target = px.Target(log_density)
    with pytest.raises(OptionError, match="Langevin"):
        px.sgld(target, integrator=px.integrators.Optax(optax.adam(0.1)))
    with pytest.raises(OptionError, match="Langevin"):
        px.pi_sgld(target, diffusion=px.diffusions.Langevin(), optimizer=optax.adam(0.1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: px.integrators.Euler(-0.1), "step_size"),
        (lambda: px.integrators.Euler(lambda t: float("nan")), "step_size"),
        (lambda: px.integrators.RMS(0.1, decay=1.0), "decay"),
        (lambda: px.integrators.RMS(0.1, epsilon=-1.0), "epsilon"),
        (lambda: px.integrators.Momentum(0.1, friction=0.0), "friction"),
    ],
)
def test_bad_options_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


# -------------------------------------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("kind", ["momentum", "rms"])
def test_small_steps_are_not_lost_in_16_bits(kind, key):
    """Memories are kept in 32: a decay of 0.999 is not 1, and a hundredth of a square counts."""
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    if kind == "momentum":
        flow = px.sghmc(target, step_size=0.02, friction=0.05)
    else:
        flow = px.sgld(target, integrator=px.integrators.RMS(0.02))
    start = jax.random.normal(key, (2000, 1))
    go = lambda kind: px.run(flow, start.astype(kind), steps=4000, key=key, progress=False)
    short, whole = (
        float(jnp.var(go(kind).particles.astype(jnp.float32)))
        for kind in (jnp.bfloat16, jnp.float32)
    )
    assert abs(short / whole - 1) < 0.25


@pytest.mark.parametrize("friction", [1e-6, 1e-4, 1.0])
def test_little_friction_makes_little_noise(friction, x64):
    """The variance of one kick is 1 - exp(-2 friction eps), in float32 too."""
    integrator = px.integrators.Momentum(0.01, friction=friction)
    one = jnp.ones((1, 1), jnp.float32)
    velocity = Velocity(0 * one, jnp.sqrt(jnp.float32(2.0)) * one)
    _, memory = integrator.step(0 * one, velocity, integrator.init(one), jnp.int32(0))
    expected = np.sqrt(-np.expm1(-2 * friction * 0.01))
    np.testing.assert_allclose(memory["momentum"], expected, rtol=1e-5)
