"""Flows: special cases coincide, noise belongs to its term, one step under every transformation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px

COMPILE_FAST = True

Blob, Langevin, Transport = px.diffusions.Blob, px.diffusions.Langevin, px.diffusions.Transport
Euler = px.integrators.Euler


def banana(x):
    return -0.5 * x[0] ** 2 - 0.5 * (x[1] - x[0] ** 2) ** 2


TARGET = px.Target(banana)


def cloud(num=8, dim=2):
    return jax.random.normal(jax.random.key(11), (num, dim))


def same(a, b):
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(left, right, strict=True)
    )


def walk(flow, start, key, steps=2, jit=False):
    step = jax.jit(flow.step) if jit else flow.step
    state = flow.init(start)
    for _ in range(steps):
        state, info = step(key, state)
    return state, info


# Special cases


@pytest.mark.parametrize("stein", [0, 0.0])
@pytest.mark.parametrize("jit", [False, True])
def test_pi_sgld_without_stein(stein, jit, key):
    adam = optax.adam(0.05)
    pairs = [
        (
            px.pi_sgld(TARGET, stein=stein, optimizer=adam),
            px.w_sgld(TARGET, optimizer=adam),
        ),
        (
            px.pi_sgld(TARGET, stein=stein, diffusion=Blob(), optimizer=adam),
            px.w_sgld_b(TARGET, optimizer=adam),
        ),
        (
            px.pi_sgld(TARGET, stein=stein, diffusion=Langevin(), step_size=0.05),
            px.sgld(TARGET, step_size=0.05),
        ),
    ]
    for one, other in pairs:
        a, b = walk(one, cloud(), key, jit=jit), walk(other, cloud(), key, jit=jit)
        assert same(a[0].particles, b[0].particles)
        assert not same(a[0].particles, cloud())


def test_pi_sgld_with_stein_is_not_w_sgld(key):
    adam = optax.adam(0.05)
    a = walk(px.pi_sgld(TARGET, stein=1.0, optimizer=adam), cloud(), key)[0]
    b = walk(px.w_sgld(TARGET, optimizer=adam), cloud(), key)[0]
    assert not np.allclose(a.particles, b.particles)


def test_flow_of_stein_is_svgd(key):
    flow = px.Flow(TARGET, (px.Stein(),), Euler(0.1))
    a, b = walk(flow, cloud(), key), walk(px.svgd(TARGET, step_size=0.1), cloud(), key)
    assert same(a[0].particles, b[0].particles)


def test_hand_made_sums_are_the_samplers(key):
    drift = px.Drift()
    for terms, flow in (
        ((drift, Langevin()), px.sgld(TARGET, step_size=0.1)),
        ((drift, Blob()), px.w_sgld_b(TARGET, step_size=0.1)),
        ((drift, Transport()), px.w_sgld(TARGET, step_size=0.1)),
        ((drift, px.Stein(), Transport()), px.pi_sgld(TARGET, step_size=0.1)),
    ):
        hand = px.Flow(TARGET, terms, Euler(0.1))
        assert same(walk(hand, cloud(), key)[0], walk(flow, cloud(), key)[0])


def test_drift_takes_the_weight_of_the_diffusion(key):
    a = px.pi_sgld(TARGET, stein=0.5, diffusion=Blob(weight=0.25), step_size=0.1)
    b = px.Flow(TARGET, (px.Drift(0.25), px.Stein(0.5), Blob(0.25)), Euler(0.1))
    assert same(walk(a, cloud(), key)[0], walk(b, cloud(), key)[0])


def test_svgd_of_one_particle_is_gradient_ascent(x64, key):
    start = np.array([[0.7, -0.4]])
    flow = px.svgd(TARGET, kernel=px.kernels.RBF(0.5), step_size=0.1)
    state, x = flow.init(start), start[0].copy()
    for _ in range(10):
        state, _ = flow.step(key, state)
        slope = x[1] - x[0] ** 2
        x = x + 0.1 * np.array([-x[0] + 2 * x[0] * slope, -slope])
        np.testing.assert_allclose(state.particles[0], x, rtol=1e-13)


def test_psgld_by_hand(x64, key):
    """Langevin with RMS, against the loop of Li et al. (2016) fed with the same noise."""
    eps, decay, small = 0.01, 0.9, 1e-4
    flow = px.sgld(TARGET, integrator=px.integrators.RMS(eps, decay=decay, epsilon=small))
    noise_only = px.Flow(px.Target(lambda x: 0.0 * x[0]), (px.Drift(), Langevin()), Euler(1.0))
    state, quiet = flow.init(cloud()), noise_only.init(cloud())
    x, v = np.asarray(cloud()), np.zeros((8, 2))
    for _ in range(5):
        moved, _ = noise_only.step(key, quiet)
        noise = (np.asarray(moved.particles) - np.asarray(quiet.particles)) / np.sqrt(2)
        slope = x[:, 1] - x[:, 0] ** 2
        score = np.stack([-x[:, 0] + 2 * x[:, 0] * slope, -slope], 1)
        v = decay * v + (1 - decay) * score**2
        gain = 1 / (small + np.sqrt(v))
        x = x + eps * gain * score + np.sqrt(2 * eps * gain) * noise
        state, _ = flow.step(key, state)
        np.testing.assert_allclose(state.particles, x, rtol=1e-9, atol=1e-11)
        quiet = eqx.tree_at(lambda s: s.step, quiet, quiet.step + 1)


def test_langevin_noise_has_the_right_size(key):
    """One Euler step of 0.01 from one point: variance 2 * 0.01."""
    flow = px.sgld(px.Target(lambda x: 0.0 * x[0]), step_size=0.01)
    state, _ = flow.step(key, flow.init(jnp.zeros((20_000, 2))))
    np.testing.assert_allclose(np.var(state.particles, axis=0), 0.02, rtol=0.05)


# Noise


@pytest.mark.parametrize("extra", [px.Stein(weight=0.0), Blob(weight=0.0), Transport(weight=0.0)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_silent_terms_change_nothing(extra, place, key):
    terms = [px.Drift(), Langevin()]
    plain = px.Flow(TARGET, tuple(terms), Euler(0.05))
    terms.insert(place, extra)
    more = px.Flow(TARGET, tuple(terms), Euler(0.05))
    one, other = walk(plain, cloud(), key)[0], walk(more, cloud(), key)[0]
    assert same(one.particles, other.particles)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("metric", [px.metrics.Identity(), px.metrics.Ensemble()])
def test_deterministic_terms_change_no_noise(place, metric, x64, key):
    """What is left of a step after its drift is the noise; it is the same with one more term."""
    eps, terms = 0.05, [px.Drift(), Langevin()]

    def noise(terms):
        quiet = [term for term in terms if not term.noisy]
        start = np.asarray(cloud(), np.float64)
        state, _ = px.Flow(TARGET, terms, Euler(eps), metric).step(
            key, px.Flow(TARGET, terms, Euler(eps), metric).init(start)
        )
        drift = px.Flow(TARGET, quiet, Euler(eps), metric)
        moved, _ = drift.step(key, drift.init(start))
        return np.asarray(state.particles) - np.asarray(moved.particles)

    plain = noise(tuple(terms))
    terms.insert(place, px.Stein(2.0))
    assert np.abs(plain).min() > 1e-6
    np.testing.assert_allclose(noise(tuple(terms)), plain, rtol=0, atol=1e-13)


def test_two_noisy_terms_are_independent(key):
    silent = px.Target(lambda x: 0.0 * x[0])
    start = jnp.zeros((20_000, 2))
    flow = px.Flow(silent, (Langevin(), Langevin()), Euler(0.01))
    state, _ = flow.step(key, flow.init(start))
    np.testing.assert_allclose(np.var(state.particles, axis=0), 0.04, rtol=0.05)


def test_noise_changes_with_the_step_and_the_key(key):
    flow = px.sgld(px.Target(lambda x: 0.0 * x[0]), step_size=0.01)
    first, _ = flow.step(key, flow.init(cloud()))
    second, _ = flow.step(key, first)
    other, _ = flow.step(jax.random.key(1), flow.init(cloud()))
    moves = [first.particles - cloud(), second.particles - first.particles]
    moves.append(other.particles - cloud())
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(moves[i] - moves[j]).min() > 1e-6


# Transformations

SAMPLERS = {
    "sgld": px.sgld(TARGET, step_size=0.05),
    "svgd": px.svgd(TARGET, optimizer=optax.adam(0.05)),
    "w_sgld": px.w_sgld(TARGET, coupling=px.diffusions.Sinkhorn(iterations=5), step_size=0.01),
    "sghmc": px.sghmc(TARGET, step_size=0.05, metric=px.metrics.Ensemble()),
}


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_jit_scan_vmap(name, key):
    flow = SAMPLERS[name]
    state = flow.init(cloud())
    plain, info = flow.step(key, state)
    close(jax.jit(flow.step)(key, state), (plain, info))
    scanned, _ = jax.lax.scan(lambda s, _: (flow.step(key, s)[0], None), state, None, length=3)
    close(scanned, walk(flow, cloud(), key, 3)[0])
    assert int(scanned.step) == 3

    keys = jax.random.split(key, 3)
    seeds, _ = jax.vmap(flow.step, in_axes=(0, None))(keys, state)
    for i in range(3):
        close(jax.tree.map(lambda leaf, i=i: leaf[i], seeds), flow.step(keys[i], state)[0])

    starts = jnp.stack([cloud(), 2 * cloud() + 1])
    states = jax.vmap(flow.init)(starts)
    both, _ = jax.jit(jax.vmap(flow.step, in_axes=(None, 0)))(key, states)
    for i in range(2):
        close(
            jax.tree.map(lambda leaf, i=i: leaf[i], both), flow.step(key, flow.init(starts[i]))[0]
        )


def test_step_is_pure(key):
    flow = SAMPLERS["w_sgld"]
    state = flow.init(cloud())
    copy = jax.tree.map(np.array, state)
    assert same(flow.step(key, state), flow.step(key, state))
    assert same(state, copy)


@pytest.mark.parametrize(
    "density",
    [
        px.zoo.Gaussian([0.0, 1.0], [[2.0, 0.3], [0.3, 1.0]]),
        px.zoo.GaussianMixture([[-2.0, 0.0], [2.0, 0.0]], sds=[0.5, 1.0], weights=[0.3, 0.7]),
        px.zoo.Banana(),
        px.zoo.U1(),
        px.zoo.U4(),
    ],
    ids=lambda d: type(d).__name__,
)
def test_jit_with_zoo_densities(density, key):
    flow = px.svgd(px.Target(density.log_density), step_size=0.1)
    state, info = jax.jit(flow.step)(key, flow.init(cloud()))
    want = [float(density.log_density(x)) for x in cloud()]
    np.testing.assert_allclose(info.log_density, want, rtol=1e-4, atol=1e-5)
    assert np.isfinite(state.particles).all()


def test_jit_with_weights_that_are_arrays(key):
    flow = px.Flow(TARGET, (px.Drift(jnp.array(0.5)), Blob(jnp.array(0.5))), Euler(jnp.array(0.1)))
    float_flow = px.Flow(TARGET, (px.Drift(0.5), Blob(0.5)), Euler(0.1))
    state = flow.init(cloud())
    close(jax.jit(flow.step)(key, state), float_flow.step(key, state))


def test_flows_are_pytrees_so_that_step_sizes_can_be_mapped_over(key):
    def final(eps):
        flow = px.svgd(TARGET, step_size=eps)
        return flow.step(key, flow.init(cloud()))[0].particles

    sizes = jnp.array([0.0, 0.1])
    moved = jax.vmap(final)(sizes)
    close(moved[0], cloud())
    close(moved[1], walk(px.svgd(TARGET, step_size=0.1), cloud(), key, 1)[0].particles)


# Schedules, infos, structure


def test_weights_and_steps_as_schedules(x64, key):
    """Each step equals the step of a flow with that step's numbers."""
    weight, size = optax.linear_schedule(1.0, 0.0, 4), optax.exponential_decay(0.1, 1, 0.5)
    terms = (px.Drift(weight), px.Stein(weight), Blob(weight), Langevin(weight))
    flow = px.Flow(TARGET, terms, Euler(size))
    state = flow.init(np.asarray(cloud()))
    for step in range(5):
        w, e = float(weight(step)), float(size(step))
        frozen = px.Flow(TARGET, (px.Drift(w), px.Stein(w), Blob(w), Langevin(w)), Euler(e))
        want, _ = frozen.step(key, state)
        state, _ = flow.step(key, state)
        np.testing.assert_allclose(state.particles, want.particles, rtol=1e-6, atol=1e-8)


def test_schedule_that_reaches_zero_stops_the_flow(key):
    flow = px.sgld(TARGET, step_size=optax.piecewise_constant_schedule(0.1, {2: 0.0}))
    two, _ = walk(flow, cloud(), key, 2)
    five, _ = walk(flow, cloud(), key, 5)
    assert same(walk(flow, cloud(), key, 3)[0].particles, five.particles)
    assert not same(two.particles, cloud())


def test_info(x64, key):
    flow = px.Flow(TARGET, (px.Drift(0.5), px.Stein(), Blob(), Langevin()), Euler(0.1))
    state = flow.init(np.asarray(cloud()))
    _, info = flow.step(key, state)
    assert list(info.forces) == ["Drift", "Stein", "Blob", "Langevin"]
    values, scores = TARGET.score(state.particles)
    np.testing.assert_allclose(info.log_density, values)
    np.testing.assert_allclose(info.score, scores)
    rms = np.sqrt(np.sum((0.5 * np.asarray(scores)) ** 2) / 8)
    np.testing.assert_allclose(info.forces["Drift"], rms, rtol=1e-12)
    assert float(info.forces["Langevin"]) == 0.0


def test_two_terms_of_one_class(x64, key):
    start = np.asarray(cloud())
    twice = px.Flow(TARGET, (px.Drift(0.25), px.Stein(), px.Drift(0.75)), Euler(0.1))
    once = px.Flow(TARGET, (px.Drift(1.0), px.Stein()), Euler(0.1))
    state, info = twice.step(key, twice.init(start))
    assert list(info.forces) == ["Drift", "Stein", "Drift2"]
    np.testing.assert_allclose(3 * info.forces["Drift"], info.forces["Drift2"], rtol=1e-12)
    want = once.step(key, once.init(start))[0].particles
    np.testing.assert_allclose(state.particles, want, rtol=1e-12)


def test_velocities_add(x64, key):
    """The move of a sum of terms is the sum of their moves."""
    start, terms = np.asarray(cloud()), (px.Drift(), px.Stein(0.5), Blob(), Transport(2.0))

    def move(*some):
        flow = px.Flow(TARGET, some, Euler(0.1))
        return np.asarray(flow.step(key, flow.init(start))[0].particles) - start

    np.testing.assert_allclose(move(*terms), sum(move(term) for term in terms), atol=1e-13)


def test_one_term_needs_no_tuple(key):
    single = px.Flow(TARGET, px.Stein(), Euler(0.1))
    assert same(
        walk(single, cloud(), key)[0].particles,
        walk(px.svgd(TARGET, step_size=0.1), cloud(), key)[0].particles,
    )


def test_leaves_are_one_long_vector(x64, key):
    """The split of coordinates into leaves does not matter."""
    start = np.asarray(jax.random.normal(key, (8, 5)))

    def density(x):
        return -0.25 * jnp.sum(x**4) + x[0] * x[3]

    def split(x):
        return {"a": x[..., :2], "b": (x[..., 2], x[..., 3:])}

    def joined(p):
        return density(jnp.concatenate([p["a"], p["b"][0][None], p["b"][1]]))

    for metric in (px.metrics.Identity(), px.metrics.Diagonal(), px.metrics.Ensemble()):
        terms = (px.Drift(), px.Stein(), Blob(), Transport())
        whole = px.Flow(px.Target(density), terms, Euler(0.01), metric)
        parts = px.Flow(px.Target(joined), terms, Euler(0.01), metric)
        want = split(whole.step(key, whole.init(start))[0].particles)
        got = parts.step(key, parts.init(split(start)))[0].particles
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
