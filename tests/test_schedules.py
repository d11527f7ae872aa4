"""Schedules: formulas, and optax schedules wherever a number may stand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax.errors import OptionError

from . import references as ref


def target():
    return px.Target(lambda x: -0.5 * jnp.sum(x**2))


@pytest.mark.parametrize(("a", "b", "gamma"), [(0.1, 1.0, 0.55), (2.0, 10.0, 1.0), (1.0, 0.5, 0.5)])
@pytest.mark.parametrize("traced", [False, True])
def test_polynomial(x64, a, b, gamma, traced):
    schedule = px.schedules.polynomial(a, b, gamma)
    schedule = jax.jit(schedule) if traced else schedule
    for t in (0, 1, 7, 10**6):
        np.testing.assert_allclose(schedule(t), a * (b + t) ** -gamma, rtol=1e-12)


@pytest.mark.parametrize("traced", [False, True])
def test_cyclical(x64, traced):
    schedule = px.schedules.cyclical(0.3, period=7)
    schedule = jax.jit(schedule) if traced else schedule
    for t in range(20):
        expected = 0.3 / 2 * (np.cos(np.pi * (t % 7) / 7) + 1)
        np.testing.assert_allclose(schedule(t), expected, rtol=1e-12)


def test_cyclical_restarts_at_its_largest_step_and_never_stops():
    schedule = px.schedules.cyclical(0.3, period=7)
    values = [float(schedule(t)) for t in range(21)]
    assert values[0] == values[7] == values[14] == max(values)
    assert min(values) > 0


def test_cyclical_late_in_a_run():
    """The phase is taken in integers: float32 would lose it after 2^24 steps."""
    schedule = jax.jit(px.schedules.cyclical(0.3, period=1000))
    late = 1000 * 2_000_000 + 250
    np.testing.assert_allclose(schedule(jnp.int32(late)), schedule(jnp.int32(250)), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: px.schedules.polynomial(-1.0), "a is"),
        (lambda: px.schedules.polynomial(1.0, b=0.0), "b is"),
        (lambda: px.schedules.polynomial(1.0, gamma=0.3), "gamma"),
        (lambda: px.schedules.polynomial(1.0, gamma=1.1), "gamma"),
        (lambda: px.schedules.cyclical(0.1, period=0), "period"),
        (lambda: px.schedules.cyclical(-0.1, period=5), "a is"),
    ],
)
def test_bad_schedules_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def path(flow, steps=4):
    state, clouds = flow.init(jnp.asarray(ref.cloud(7, 2))), []
    step = jax.jit(flow.step)
    for _ in range(steps):
        state, _ = step(jax.random.key(0), state)
        clouds.append(np.asarray(state.particles))
    return clouds


SCHEDULES = {
    "exponential": (optax.exponential_decay(0.2, 1, 0.5), lambda t: 0.2 * 0.5**t),
    "piecewise": (
        optax.piecewise_constant_schedule(0.2, {2: 0.1}),
        lambda t: 0.2 if t < 2 else 0.02,
    ),
    "polynomial": (px.schedules.polynomial(0.2), lambda t: 0.2 * (1 + t) ** -0.55),
    "lambda": (lambda t: 0.2 / (1 + t), lambda t: 0.2 / (1 + t)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_as_step_size(x64, name):
    """Drift alone on N(0, I): x shrinks by 1 - eps_t at every step, counted from 0."""
    schedule, eps = SCHEDULES[name]
    flow = px.Flow(target(), (px.Drift(),), px.integrators.Euler(schedule))
    x = ref.cloud(7, 2)
    for t, found in enumerate(path(flow)):
        x = x * (1 - eps(t))
        np.testing.assert_allclose(found, x, rtol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_as_weight(x64, name):
    schedule, weight = SCHEDULES[name]
    flow = px.Flow(target(), (px.Drift(schedule),), px.integrators.Euler(0.5))
    x = ref.cloud(7, 2)
    for t, found in enumerate(path(flow)):
        x = x * (1 - 0.5 * weight(t))
        np.testing.assert_allclose(found, x, rtol=1e-6)


SAMPLERS = {
    "sgld": lambda **o: px.sgld(target(), **o),
    "svgd": lambda **o: px.svgd(target(), **o),
    "w_sgld": lambda **o: px.w_sgld(target(), **o),
    "w_sgld_b": lambda **o: px.w_sgld_b(target(), **o),
    "pi_sgld": lambda **o: px.pi_sgld(target(), **o),
    "sghmc": lambda **o: px.sghmc(target(), **o),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_take_a_schedule_as_step_size(name):
    """A constant schedule is the constant."""
    constant = path(SAMPLERS[name](step_size=0.05))
    scheduled = path(SAMPLERS[name](step_size=optax.constant_schedule(0.05)))
    np.testing.assert_allclose(constant, scheduled, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Blob", "GFSD", "Transport", "Langevin"])
def test_diffusions_take_a_schedule_as_weight(name):
    term = getattr(px.diffusions, name)
    constant = px.Flow(target(), (px.Drift(), term(0.7)), px.integrators.Euler(0.05))
    schedule = term(optax.constant_schedule(0.7))
    scheduled = px.Flow(target(), (px.Drift(), schedule), px.integrators.Euler(0.05))
    np.testing.assert_allclose(path(constant), path(scheduled), rtol=1e-6)


def test_the_stein_weight_of_pi_sgld_may_be_a_schedule():
    """stein falls to zero after the first step: from there on it is the sampler without Stein."""
    off = optax.piecewise_constant_schedule(1.0, {1: 0.0})
    flow = px.pi_sgld(target(), stein=off, step_size=0.05)
    bare = px.w_sgld(target(), step_size=0.05)
    state, _ = flow.step(jax.random.key(0), flow.init(jnp.asarray(ref.cloud(7, 2))))
    moved, _ = flow.step(jax.random.key(0), state)
    other = bare.init(state.particles)
    expected, _ = bare.step(jax.random.key(0), other)
    np.testing.assert_allclose(moved.particles, expected.particles, rtol=1e-5)


def test_a_weight_schedule_reaches_the_drift_of_pi_sgld():
    """Stationarity: the drift takes the diffusion's weight, schedule or not."""
    schedule = optax.linear_schedule(1.0, 0.5, 10)
    flow = px.pi_sgld(target(), diffusion=px.diffusions.Blob(schedule), step_size=0.05)
    drift = next(term for term in flow.terms if isinstance(term, px.Drift))
    assert drift.weight is schedule


@pytest.mark.parametrize("value", ["fast", None, (1, 2)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="step"):
        px.integrators.Euler(value)
