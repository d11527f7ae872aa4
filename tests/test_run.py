"""px.run: chunks, resume, history, observers, progress, donation, traces, score evaluations."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import particlax as px
from particlax import history

run_module = sys.modules["particlax.run"]  # px.run is the function


def bell(x):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


TARGET = px.Target(bell)


def cloud(num=6, dim=2):
    return jax.random.normal(jax.random.key(9), (num, dim))


def tree(num=6):
    keys = jax.random.split(jax.random.key(8))
    return {"w": jax.random.normal(keys[0], (num, 2, 2)), "b": jax.random.normal(keys[1], (num,))}


def same(a, b):
    """Bit for bit, whole states."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(left, right, strict=True)
    )


def go(flow, start, steps, key, **options):
    return px.run(flow, start, steps=steps, key=key, progress=False, **options)


def by_hand(flow, start, steps, key):
    """The clouds after 1, 2, ... steps of a Python loop."""
    step, state, clouds = jax.jit(flow.step), flow.init(start), []
    for _ in range(steps):
        state, _ = step(key, state)
        clouds.append(state.particles)
    return clouds


FLOWS = {
    "sgld": px.sgld(TARGET, step_size=0.05),
    "sghmc": px.sghmc(TARGET, step_size=0.1),
    "psgld": px.sgld(TARGET, integrator=px.integrators.RMS(0.05)),
    "svgd": px.svgd(TARGET, optimizer=optax.adam(0.05)),
    "sinkhorn": px.w_sgld(
        TARGET,
        coupling=px.diffusions.Sinkhorn(iterations=5),
        inner=3,
        optimizer=optax.adagrad(0.1),
    ),
    "pi_sgld": px.pi_sgld(
        TARGET, diffusion=px.diffusions.Langevin(), step_size=px.schedules.polynomial(0.1)
    ),
}


@pytest.mark.parametrize("name", FLOWS)
def test_same_key_same_result_however_the_run_is_cut(name, key):
    flow, start = FLOWS[name], tree()
    whole = go(flow, start, 17, key)
    assert same(whole.state, go(flow, start, 17, key).state)
    first = go(flow, start, 10, key)
    assert int(first.state.step) == 10
    second = go(flow, first.state, 7, key)
    assert same(whole.state, second.state)
    assert same(whole.log_density, second.log_density)
    assert int(second.state.step) == 17


def test_other_key_other_result(key):
    flow = FLOWS["sgld"]
    one, other = go(flow, tree(), 5, key), go(flow, tree(), 5, jax.random.key(1))
    assert not np.allclose(one.particles["w"], other.particles["w"])


def test_resuming_leaves_the_state_usable(key):
    flow = FLOWS["sgld"]
    state = go(flow, tree(), 5, key).state
    one, two = go(flow, state, 5, key), go(flow, state, 5, key)
    assert same(one.state, two.state)
    assert np.isfinite(state.particles["w"]).all()


def test_chunks_do_not_matter(key, monkeypatch):
    flow = FLOWS["svgd"]
    whole = go(flow, cloud(), 50, key)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.0)  # every chunk is one step
    seen = []
    cut = go(flow, cloud(), 50, key, observers=[lambda s: seen.append(int(s.state.step))])
    assert seen == list(range(1, 51))
    assert same(whole.state, cut.state)


def test_steps_of_an_inner_loop():
    together = run_module.together
    assert [together(n, 0) for n in (1000, 48, 30, 14, 9, 7, 1)] == [5, 4, 5, 2, 3, 1, 1]
    assert together(1000, 32) == 4
    assert together(1000, 0, 64, 0, 6) == 2


TOGETHER = [
    ({}, 0, 4),
    ({}, 6, 4),
    ({"thin": 4}, 0, 4),
    ({"thin": 4}, 6, 2),  # due at steps 8, 12, ...: two after the start
    ({"observe_every": 6}, 6, 3),
    ({"every": 12}, 0, 4),
    ({"every": 12}, 9, 3),
    ({"every": 12}, 7, 1),
]


@pytest.mark.parametrize(("options", "start", "expected"), TOGETHER)
def test_steps_taken_together_do_not_matter(options, start, expected, key, tmp_path, monkeypatch):
    """As on a GPU: loops within loops."""
    flow, seen, taken, advance = FLOWS["svgd"], [], [], run_module.advance
    begin = go(flow, cloud(), start, key).state
    whole = go(flow, begin, 48, key, thin=options.get("thin"))

    def noted(fixed, state, size, clock):
        taken.append((size, clock.together))
        return advance(fixed, state, size, clock)

    monkeypatch.setattr(run_module, "_waits", lambda size: True)
    monkeypatch.setattr(run_module, "advance", noted)
    folder = {"checkpoint": tmp_path / "run"} if "every" in options else {}
    watch = lambda s: seen.append(int(s.state.step) - start)
    nested = go(flow, begin, 48, key, observers=watch, **options, **folder)
    assert same(whole.state, nested.state)
    assert same(whole.history, nested.history)
    assert {each for _, each in taken} == {expected}
    assert sum(size for size, _ in taken) == 48
    assert all(size % expected == 0 for size, _ in taken)
    if "observe_every" in options:
        assert seen == list(range(6, 49, 6))


@pytest.mark.parametrize("name", ["sgld", "svgd"])
@pytest.mark.parametrize("thin", [1, 4, 12, 30])
def test_history(name, thin, key):
    flow, start = FLOWS[name], tree()
    result, clouds = go(flow, start, 12, key, thin=thin), by_hand(flow, start, 12, key)
    wanted = [step for step in range(1, 13) if step % thin == 0]
    assert result.history.steps.tolist() == wanted
    for leaf in ("w", "b"):
        kept = result.history.particles[leaf]
        assert isinstance(kept, np.ndarray)
        assert kept.shape == (len(wanted), *start[leaf].shape)
        for row, step in enumerate(wanted):
            np.testing.assert_allclose(kept[row], clouds[step - 1][leaf], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.particles[leaf], clouds[-1][leaf], rtol=1e-5, atol=1e-6)


def test_last_cloud_of_the_history_is_the_result(key):
    result = go(FLOWS["sgld"], cloud(), 12, key, thin=3)
    assert np.array_equal(result.history.particles[-1], result.particles)


@pytest.mark.parametrize("room", [1, 100, 300])
def test_history_larger_than_the_device_buffer(room, key, monkeypatch):
    """A cloud of 6 x 2 floats has 48 bytes: buffers of 1, 2 and 4 clouds."""
    flow, sizes = FLOWS["sgld"], []
    whole = go(flow, cloud(), 40, key, thin=3)
    monkeypatch.setattr(history, "HISTORY_BYTES", room)
    keep = history.Keeper.keep
    monkeypatch.setattr(
        history.Keeper,
        "keep",
        lambda self, start, size, buffer: (
            sizes.append(len(jax.tree.leaves(buffer)[0])),
            keep(self, start, size, buffer),
        )[1],
    )
    cut = go(flow, cloud(), 40, key, thin=3)
    assert set(sizes) == {
        {1: 1, 100: 2, 300: 4}[room] + 1
    }  # and one row for clouds that are not kept
    assert cut.history.steps.tolist() == list(range(3, 41, 3))
    assert np.array_equal(whole.history.particles, cut.history.particles)
    assert same(whole.state, cut.state)


def test_history_of_a_resumed_run_goes_on(key):
    flow = FLOWS["sgld"]
    whole = go(flow, cloud(), 20, key, thin=3)
    first = go(flow, cloud(), 10, key, thin=3)
    second = go(flow, first.state, 10, key, thin=3)
    assert first.history.steps.tolist() == [3, 6, 9]
    assert second.history.steps.tolist() == [12, 15, 18]
    joined = np.concatenate([first.history.particles, second.history.particles])
    assert np.array_equal(whole.history.particles, joined)


def test_no_history_unless_asked(key):
    assert go(FLOWS["sgld"], cloud(), 3, key).history is None


@pytest.mark.parametrize("thin", [None, 2])
def test_no_steps(thin, key):
    result = go(FLOWS["sgld"], tree(), 0, key, thin=thin)
    assert same(result.particles, tree())
    assert int(result.state.step) == 0
    assert not result.stopped
    if thin:
        assert result.history.steps.shape == (0,)
        assert result.history.particles["w"].shape == (0, 6, 2, 2)


@pytest.mark.parametrize("thin", [None, 3])
def test_observers(thin, key):
    steps, totals, second = [], [], []

    def watch(snapshot):
        steps.append(int(snapshot.state.step))
        totals.append(snapshot.steps)
        assert snapshot.seconds > 0
        assert snapshot.log_density.shape == (6,)
        assert np.isfinite(snapshot.log_density).all()
        return False

    result = go(
        FLOWS["sgld"],
        cloud(),
        23,
        key,
        thin=thin,
        observers=[watch, lambda s: second.append(int(s.state.step))],
        observe_every=5,
    )
    assert steps == second == [5, 10, 15, 20, 23]
    assert set(totals) == {23}
    assert not result.stopped


def test_observers_see_the_clouds_of_a_loop_by_hand(key):
    flow, seen = FLOWS["sgld"], {}

    def watch(snapshot):
        seen[int(snapshot.state.step)] = np.asarray(snapshot.state.particles)

    go(flow, cloud(), 9, key, observers=[watch], observe_every=4)
    clouds = by_hand(flow, cloud(), 9, key)
    assert sorted(seen) == [4, 8, 9]
    for step, particles in seen.items():
        np.testing.assert_allclose(particles, clouds[step - 1], rtol=1e-5, atol=1e-6)


def test_observers_may_keep_what_they_saw(key):
    """A kept snapshot stays readable although the run donates its buffers."""
    kept = []
    go(FLOWS["sgld"], cloud(), 6, key, observers=[kept.append], observe_every=2)
    assert [int(snapshot.state.step) for snapshot in kept] == [2, 4, 6]
    assert all(np.isfinite(snapshot.state.particles).all() for snapshot in kept)


def test_observers_of_a_resumed_run_know_its_end(key):
    state, totals = go(FLOWS["sgld"], cloud(), 4, key).state, []
    go(FLOWS["sgld"], state, 6, key, observers=[lambda s: totals.append(s.steps)], observe_every=3)
    assert totals == [10, 10]


@pytest.mark.parametrize("thin", [None, 1])
def test_observer_stops_the_run(thin, key):
    flow = FLOWS["sgld"]
    calls = []

    def stop(snapshot):
        return int(snapshot.state.step) >= 6

    result = go(
        flow,
        cloud(),
        100,
        key,
        thin=thin,
        observers=[stop, lambda s: calls.append(1)],
        observe_every=3,
    )
    assert result.stopped
    assert int(result.state.step) == 6
    assert len(calls) == 2  # the others are called too
    assert same(result.state, go(flow, cloud(), 6, key, thin=thin).state)
    if thin:
        assert result.history.steps.tolist() == [1, 2, 3, 4, 5, 6]


def test_only_true_stops(key):
    for value in (1, "yes", [0], None):
        result = go(
            FLOWS["sgld"], cloud(), 4, key, observers=[lambda s, v=value: v], observe_every=2
        )
        assert not result.stopped
        assert int(result.state.step) == 4


def test_observer_returning_a_jax_or_numpy_truth_stops(key):
    """A comparison of arrays is not the constant True, yet the author of the observer means it."""
    for value in (np.True_, jnp.array(True)):
        result = go(
            FLOWS["sgld"], cloud(), 4, key, observers=[lambda s, v=value: v], observe_every=2
        )
        assert result.stopped


def test_progress_on_and_off(key, capsys):
    go(FLOWS["sgld"], cloud(), 30, key)
    off = capsys.readouterr()
    assert off.out == off.err == ""
    px.run(FLOWS["sgld"], cloud(), steps=30, key=key)
    on = capsys.readouterr()
    printed = on.out + on.err
    assert "30/30 steps" in printed
    assert "/s" in printed
    assert "mean log density" in printed


def test_callers_arrays_survive(key):
    start, copy = tree(), jax.tree.map(np.array, tree())
    result = go(FLOWS["sgld"], start, 10, key)
    assert same(start, copy)
    assert not same(result.particles, copy)
    flow = FLOWS["sinkhorn"]
    state = flow.init(start)
    go(flow, state, 5, key)
    assert same(start, copy)
    assert same(state.particles, copy)
    assert int(state.step) == 0


def test_numpy_particles(key):
    start = jax.tree.map(np.array, tree())
    assert same(go(FLOWS["sgld"], start, 4, key).state, go(FLOWS["sgld"], tree(), 4, key).state)


def test_seconds(key):
    result = go(FLOWS["sgld"], cloud(), 3, key)
    assert 0 < result.seconds < 60


DATA = np.linspace(-1, 3, 12).astype(np.float32)
REGRESSION = px.Target(
    log_prior=bell, log_likelihood=lambda x, y: -0.5 * (y - x[0]) ** 2, num_data=12
)


def test_full_batch_data(key):
    """Prior N(0, 1) and 12 data: gradient ascent goes to the mode."""
    flow = px.Flow(REGRESSION, (px.Drift(),), px.integrators.Euler(0.05))
    result = go(flow, cloud(), 300, key, data=DATA)
    np.testing.assert_allclose(result.particles[:, 0], DATA.sum() / 13, rtol=1e-5)
    np.testing.assert_allclose(result.particles[:, 1], 0.0, atol=1e-5)


def test_minibatches_are_those_of_the_steps(key):
    """A loop by hand with the batches of steps 0, 1, ... gives the same; cutting changes nothing."""
    flow, data = px.sgld(REGRESSION, step_size=0.01), px.Minibatches(DATA, 4)
    whole = go(flow, cloud(), 11, key, data=data)
    first = go(flow, cloud(), 5, key, data=data)
    assert same(whole.state, go(flow, first.state, 6, key, data=data).state)
    state, used = flow.init(cloud()), jax.random.fold_in(key, 2**31 - 1)
    for step in range(11):
        state, _ = flow.step(key, state, data.batch(used, jnp.array(step)))
    np.testing.assert_allclose(whole.particles, state.particles, rtol=1e-5, atol=1e-6)


def test_minibatch_of_everything_equals_full_batch(key, x64):
    flow = px.sgld(REGRESSION, step_size=0.01)
    start, data = np.asarray(cloud(), np.float64), DATA.astype(np.float64)
    full = go(flow, start, 8, key, data=data)
    mini = go(flow, start, 8, key, data=px.Minibatches(data, 12))
    np.testing.assert_allclose(full.particles, mini.particles, rtol=1e-12)


def counting():
    calls = []

    def density(x):
        calls.append(1)
        return -0.5 * jnp.sum(x**2)

    return px.Target(density), calls


@pytest.mark.parametrize("thin", [None, 2])
def test_one_trace_for_a_whole_run(thin, key, monkeypatch):
    target, calls = counting()
    flow = px.pi_sgld(target, step_size=0.01)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.001)
    chunks = []
    options = {"thin": thin, "observers": [lambda s: chunks.append(1)], "observe_every": 3}
    go(flow, cloud(), 100, key, **options)
    assert len(chunks) == 34
    assert len(calls) == 1
    go(flow, cloud(), 100, key, **options)
    go(flow, cloud() + 1, 100, jax.random.key(4), **options)
    assert len(calls) == 1
    go(flow, cloud(7), 100, key, **options)  # another shape is another program
    assert len(calls) == 2


def test_other_lengths_and_resuming_compile_nothing(key):
    target, calls = counting()
    flow = px.svgd(target, optimizer=optax.adam(0.1))
    result = go(flow, cloud(), 10, key)
    go(flow, cloud(), 57, key)
    go(flow, result.state, 3, key)
    assert len(calls) == 1


def test_one_trace_with_minibatches(key):
    calls = []

    def likelihood(x, y):
        calls.append(1)
        return -0.5 * (y - x[0]) ** 2

    target = px.Target(log_prior=bell, log_likelihood=likelihood, num_data=12)
    flow = px.sgld(target, step_size=0.01)
    for seed in range(2):
        go(flow, cloud(), 20, jax.random.key(seed), data=px.Minibatches(DATA, 4))
    assert len(calls) == 1


@pytest.mark.parametrize("metric", [px.metrics.Identity(), px.metrics.Ensemble()])
def test_exactly_one_score_per_particle_and_step(metric, key):
    """Counted while running, forwards and backwards, with three terms at once."""
    values, gradients = [], []

    @jax.custom_vjp
    def density(x):
        return -0.5 * jnp.sum(x**2)

    def forward(x):
        jax.debug.callback(values.append, x)
        return density(x), x

    def backward(x, cotangent):
        jax.debug.callback(gradients.append, x)
        return (-cotangent * x,)

    density.defvjp(forward, backward)
    terms = (px.Drift(), px.Stein(0.5), px.diffusions.Blob())
    flow = px.Flow(px.Target(density), terms, px.integrators.Euler(0.01), metric)
    result = go(flow, cloud(), 5, key, thin=1)
    jax.effects_barrier()
    assert len(values) == len(gradients) == 5 * 6
    starts = np.concatenate([np.asarray(cloud())[None], result.history.particles[:-1]])
    order = np.lexsort(np.asarray(values).T)
    wanted = starts.reshape(-1, 2)
    np.testing.assert_allclose(np.asarray(values)[order], wanted[np.lexsort(wanted.T)], rtol=1e-6)


def test_log_density_is_that_of_the_last_step(key):
    result = go(FLOWS["sgld"], cloud(), 5, key, thin=1)
    want = -0.5 * np.sum(result.history.particles[-2] ** 2, 1)
    np.testing.assert_allclose(result.log_density, want, rtol=1e-5)
