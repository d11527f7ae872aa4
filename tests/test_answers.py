"""Parts of one's own: what they hand back is checked, and what they hand back rightly is used as it is."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import engine
from particlax.errors import OptionError
from particlax.terms import Term, Velocity

COMPILE_FAST = True

Euler, Langevin = px.integrators.Euler, px.diffusions.Langevin
NORMAL = px.Target(lambda x: -0.5 * jnp.sum(x**2))


class Own(Term):
    """A term that does as it is told: `give(cloud, key, memory)`."""

    weight: float = 1.0
    give: Any = eqx.field(static=True, default=None)
    start: Any = eqx.field(static=True, default=lambda particles: ())

    def init(self, particles):
        return self.start(particles)

    def __call__(self, cloud, key, memory):
        return self.give(cloud, key, memory)


class Draws(Own):
    random: ClassVar[bool] = True


class Noisy(Own):
    noisy: ClassVar[bool] = True


def cloud(num=6, dim=3):
    return jax.random.normal(jax.random.key(5), (num, dim))


def step(key, terms, integrator=Euler(1.0), start=None):
    flow = px.Flow(NORMAL, terms, integrator)
    return flow.step(key, flow.init(cloud() if start is None else start))[0].particles


normal = lambda cloud, key, memory: (Velocity(jax.random.normal(key, cloud.x.shape)), memory)


# ---------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("kind", [Draws, Noisy])
def test_every_term_that_asks_has_a_key_of_its_own(kind, key):
    """Also where the first one puts its random numbers into the drift."""
    start = jnp.zeros((5, 4))
    first = step(key, (kind(give=normal),), start=start)
    both = step(key, (kind(give=normal), kind(give=normal)), start=start)
    assert not np.allclose(both, 2 * first)
    assert not np.allclose(both - first, 0)


def test_random_drifts_change_no_noise_and_are_drifts(key):
    alone = step(key, (Langevin(),))
    draw = step(key, (Draws(give=normal),))
    both = step(key, (Draws(give=normal), Langevin()))
    np.testing.assert_allclose(both - cloud(), (alone - cloud()) + (draw - cloud()), atol=1e-5)
    assert not np.allclose(draw, alone)
    step(key, (Draws(give=normal),), px.integrators.Optax(optax.sgd(0.1)))  # no noise: no refusal


@pytest.mark.parametrize(("kind", "words"), [(Own, "not declared"), (Draws, "declare it `noisy`")])
def test_noise_that_was_not_declared_is_refused(kind, words, key):
    give = lambda cloud, key, memory: (Velocity(0 * cloud.x, jnp.ones_like(cloud.x)), memory)
    with pytest.raises(OptionError, match=words):
        step(key, (px.Drift(), kind(give=give)))


# ------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda c, k, m: Velocity(c.x), "gave a Velocity alone; expected a pair"),
        (lambda c, k, m: (c.x, m), "a tuple of .*, tuple; expected a pair"),
        (lambda c, k, m: c.x, "gave .*; expected a pair"),
        (lambda c, k, m: (Velocity(c.x[:, None]), m), r"shape \(6, 1, 3\).*\(6, 3\)"),
        (lambda c, k, m: (Velocity(c.x[:, 0]), m), r"the drift .* shape \(6,\)"),
        (lambda c, k, m: (Velocity({"x": c.x}), m), "the drift of the term Own is PyTreeDef"),
        (lambda c, k, m: (Velocity(c.x), None), "the memory that the term Own gave is"),
        (lambda c, k, m: (Velocity(c.x), (jnp.zeros(3),)), "the memory that the term Own gave is"),
    ],
)
def test_a_term_that_answers_wrongly_is_told(give, words, key):
    with pytest.raises(OptionError, match=words):
        step(key, (px.Drift(), Own(give=give)))


def test_a_drift_of_none_is_zero(key):
    give = lambda cloud, key, memory: (Velocity(None, jnp.ones_like(cloud.x)), memory)
    np.testing.assert_allclose(step(key, (Noisy(give=give),)), cloud() + 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda x: x, "the integrator Odd gave"),
        (lambda x: (x[:, :1], ()), r"made of the particles has shape \(6, 1\)"),
        (lambda x: (x, x), "the memory that the integrator Odd gave"),
    ],
)
def test_an_integrator_that_answers_wrongly_is_told(found, words, key):
    class Odd(px.integrators.Integrator):
        def init(self, particles):
            return ()

        def step(self, particles, velocity, memory, step):
            return found(particles)

    with pytest.raises(OptionError, match=words):
        step(key, (px.Drift(),), Odd())


@pytest.mark.parametrize(
    "start",
    [lambda x: x, lambda x: (x, x), lambda x: dict.fromkeys("ab", jnp.zeros(2))],
    ids=["the cloud", "twice", "one array"],
)
def test_memories_may_be_the_cloud_itself_or_one_array_twice(start, key):
    give = lambda cloud, key, memory: (Velocity(-cloud.x), memory)
    flow = px.Flow(NORMAL, (Own(give=give, start=start),), Euler(0.1))
    done = px.run(flow, cloud(), steps=3, key=key, progress=False)
    np.testing.assert_allclose(done.particles, 0.9**3 * cloud(), rtol=1e-5)


# -------------------------------------------------------------------- few particles in many dimensions


class Stretched(px.kernels.RBF):
    """A kernel that is not radial: coordinates are measured in units of their own."""

    def apart(self, force, *clouds):
        units = jnp.linspace(0.1, 10.0, clouds[0].shape[1])
        return force(self, clouds[0] / units, *[part * units for part in clouds[1:]]) / units


@pytest.mark.parametrize("dim", [70, 4097])
@pytest.mark.parametrize("kind", [px.Stein, px.diffusions.Blob, px.diffusions.GFSD])
def test_kernels_that_stretch_are_used_in_many_dimensions(kind, dim, key):
    start = cloud(5, dim)
    own = step(key, (kind(kernel=Stretched()),), start=start)
    units = jnp.linspace(0.1, 10.0, dim)
    target = px.Target(lambda z: -0.5 * jnp.sum((units * z) ** 2))
    flow = px.Flow(target, (kind(),), Euler(1.0))
    there = flow.step(key, flow.init(start / units))[0].particles - start / units
    np.testing.assert_allclose(
        (own - start) * units, there, atol=1e-3 * float(jnp.abs(there).max())
    )


@pytest.mark.parametrize("dim", [70, 4097])
def test_a_mixin_that_moves_particles_its_own_way_is_called(dim, key):
    class Clip:
        def __call__(self, cloud, key, memory):
            velocity, memory = super().__call__(cloud, key, memory)
            return Velocity(jnp.clip(velocity.drift, -1e-3, 1e-3)), memory

    class Careful(Clip, px.Stein):
        pass

    start = cloud(5, dim)
    assert float(jnp.abs(step(key, (Careful(),), start=start) - start).max()) <= 1.01e-3


# -------------------------------------------------------------------------------------- particles replaced


def test_only_what_belongs_to_a_particle_is_copied_with_it(key):
    """Also where a term's matrix has as many rows as there are particles, or a history has them on its second axis."""
    start = lambda x: {
        "matrix": jnp.diag(jnp.arange(1.0, 1 + x.shape[1])),
        "history": jnp.broadcast_to(jnp.arange(1.0 * len(x))[None, :, None], (2, *x.shape)),
        "own": jnp.arange(len(x)),
    }
    give = lambda cloud, key, memory: (Velocity(-cloud.x), memory)
    flow = px.Flow(NORMAL, (Own(give=give, start=start),), Euler(0.1))
    state = flow.init(cloud(4, 4))
    axes = engine._particle_axes(flow, state)
    mended, sources = engine._mend(key, state, [2], axes=axes)
    (before,), (after,) = state.terms, mended.terms
    np.testing.assert_array_equal(after["matrix"], before["matrix"])
    assert after["own"][2] == sources[0]
    np.testing.assert_array_equal(after["history"][:, 2], before["history"][:, sources[0]])


# ---------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("place", ["step_size", "optimizer"])
def test_a_schedule_that_asks_for_the_step_is_told_what_to_write(place, key):
    fall = lambda step: 0.1 if step < 100 else 0.01
    option = {"step_size": fall} if place == "step_size" else {"optimizer": optax.adam(fall)}
    with pytest.raises(OptionError, match=r"jnp\.where\(step < 100"):
        px.run(px.svgd(NORMAL, **option), cloud(), steps=3, key=key, progress=False)


def test_an_optimizer_with_parameters_of_its_own_form_is_refused(key):
    flow = px.svgd(NORMAL, optimizer=optax.lookahead(optax.adam(0.1), 5, 0.5))
    with pytest.raises(OptionError, match="parameters of a form of its own"):
        flow.step(key, flow.init(cloud()))


def test_errors_of_an_optimizer_are_its_own(key):
    """What is not a missing argument is no word about line searches."""

    def update(updates, state, params=None):
        raise TypeError("mine")

    odd = optax.GradientTransformation(lambda params: (), update)
    flow = px.svgd(NORMAL, optimizer=odd)
    with pytest.raises(TypeError, match=r"^mine$"):
        flow.step(key, flow.init(cloud()))


def test_terms_see_the_log_densities_of_their_scores(key):
    """Of the same minibatch, without another evaluation."""
    rows = jnp.arange(12.0)
    target = px.Target(
        log_prior=lambda x: 0.0 * x.sum(),
        log_likelihood=lambda x, batch: -0.5 * (batch - x.sum()) ** 2,
        num_data=12,
    )
    give = lambda cloud, key, memory: (Velocity(cloud.log_density[:, None] + 0 * cloud.x), memory)
    flow = px.Flow(target, (Own(give=give),), Euler(1.0))
    batch = rows[3:7]
    moved = flow.step(key, flow.init(cloud()), batch)[0].particles - cloud()
    np.testing.assert_allclose(moved[:, 0], target.score(cloud(), batch)[0], rtol=1e-4)
