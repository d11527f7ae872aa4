"""Diagnostics against NumPy references, and what they are for: alarms that fire when they must."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import diagnostics, pairwise, zoo
from particlax.errors import ParticleError

from . import references as ref

LAYOUTS = [(3, "array"), (3, "tree"), (12, "array"), (12, "tree")]


def as_jax(matrix, kind="array"):
    return jax.tree.map(jnp.asarray, ref.layout(matrix, kind))


@pytest.fixture
def fresh_ksd():
    """`ksd` is compiled once per shape: forget it where the strips' size is changed."""
    diagnostics.ksd.clear_cache()
    yield diagnostics.ksd
    diagnostics.ksd.clear_cache()


# ----------------------------------------------------------------------------------------------------- KSD


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_ksd_equals_the_double_loop(x64, dim, kind):
    x, score = ref.cloud(11, dim, centre=3.0), ref.cloud(11, dim, seed=1)
    value = diagnostics.ksd(as_jax(x, kind), as_jax(score, kind))
    np.testing.assert_allclose(value, ref.ksd(x, score), rtol=1e-10)


@pytest.mark.parametrize("elements", [1, 100])
@pytest.mark.parametrize("dim", [3, 12])
def test_ksd_in_strips_equals_the_double_loop(x64, monkeypatch, fresh_ksd, dim, elements):
    x, score = ref.cloud(13, dim), ref.cloud(13, dim, seed=1)
    monkeypatch.setitem(pairwise.STRIP_ELEMENTS, "cpu", elements)
    value = fresh_ksd(jnp.asarray(x), jnp.asarray(score))
    np.testing.assert_allclose(value, ref.ksd(x, score), rtol=1e-10)


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_ksd_in_float32(shift):
    """The sum of the Stein kernel cancels; far from the origin the answer may not change much."""
    x = ref.cloud(30, 3).astype(np.float32) + np.float32(shift)
    score = -(x.astype(np.float64) - shift)
    value = diagnostics.ksd(jnp.asarray(x), jnp.asarray(score, jnp.float32))
    np.testing.assert_allclose(value, ref.ksd(x.astype(np.float64), score), rtol=1e-4)


def test_ksd_prefers_the_right_target(key):
    x = jax.random.normal(key, (400, 2))
    right, narrow, shifted = (diagnostics.ksd(x, s) for s in (-x, -2 * x, 1 - x))
    assert right < 0.5 * narrow
    assert right < 0.5 * shifted


# ------------------------------------------------------------------------------------------ MMD, Wasserstein


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_mmd2_equals_the_double_loop(x64, dim, kind):
    x, y = ref.cloud(7, dim), ref.cloud(10, dim, seed=1)
    kernel = px.kernels.IMQ(bandwidth=1.3)
    value = diagnostics.mmd2(as_jax(x, kind), as_jax(y, kind), kernel)
    np.testing.assert_allclose(value, ref.mmd2(x, y, 1.3, ref.imq), rtol=1e-10)


def test_mmd2_takes_its_bandwidth_from_the_second_set(x64):
    x, y = 5 * ref.cloud(7, 3), ref.cloud(11, 3, seed=1)  # 55 pairs
    value = diagnostics.mmd2(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(value, ref.mmd2(x, y, ref.median_bandwidth(y)), rtol=1e-10)


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
@pytest.mark.parametrize("num", [1, 2, 6])
def test_wasserstein2_equals_the_best_permutation(x64, num, dim, kind):
    x, y = ref.cloud(num, dim), ref.cloud(num, dim, seed=1)
    value = diagnostics.wasserstein2(as_jax(x, kind), as_jax(y, kind))
    np.testing.assert_allclose(value, ref.wasserstein2(x, y), rtol=1e-10)


def test_wasserstein2_does_not_depend_on_the_order(x64):
    x = ref.cloud(7, 3)
    value = diagnostics.wasserstein2(jnp.asarray(x), jnp.asarray(x[::-1]))
    assert value < 1e-7


def test_wasserstein2_of_unequal_sizes_counts_points_by_their_mass():
    x = ref.cloud(3, 2, seed=0)
    twice = np.concatenate([x, x])
    assert diagnostics.wasserstein2(jnp.asarray(x), jnp.asarray(twice)) == 0
    y = ref.cloud(6, 2, seed=1)
    expected = ref.wasserstein2(twice, y)
    np.testing.assert_allclose(
        diagnostics.wasserstein2(jnp.asarray(x), jnp.asarray(y)), expected, rtol=1e-6
    )


def test_sliced_wasserstein2_of_a_set_and_its_copies_is_zero():
    x = jnp.array([[0.0], [1.0], [2.0], [9.0]])
    assert float(diagnostics.sliced_wasserstein2(x, jnp.concatenate([x, x, x]))) == 0


def test_sliced_wasserstein2_of_unequal_sizes_in_one_dimension_is_exact():
    """{0, 1} against {0, 0, 3}: mass 1/6 moves by 1 and mass 1/3 by 2."""
    x, y = jnp.array([[0.0], [1.0]]), jnp.array([[0.0], [0.0], [3.0]])
    expected = np.sqrt(1 / 6 + 4 / 3)
    np.testing.assert_allclose(diagnostics.sliced_wasserstein2(x, y), expected, rtol=1e-6)


def test_sets_of_different_dimension_are_refused():
    with pytest.raises(ParticleError, match="D = 2 and D = 3"):
        diagnostics.wasserstein2(jnp.zeros((4, 2)), jnp.zeros((4, 3)))


def test_wasserstein2_of_large_sets_is_sliced(monkeypatch):
    monkeypatch.setattr(diagnostics, "EXACT_SIZE", 10)
    x, y = (jnp.asarray(ref.cloud(11, 3, seed=s)) for s in (0, 1))
    assert diagnostics.wasserstein2(x, y) == float(diagnostics.sliced_wasserstein2(x, y))


def units(key, directions, dim):
    normals = np.asarray(jax.random.normal(key, (directions, dim)))
    return normals / np.linalg.norm(normals, axis=1, keepdims=True)


def test_sliced_wasserstein2_by_hand(x64, key):
    x, y = ref.cloud(9, 3), ref.cloud(9, 3, seed=1)
    value = diagnostics.sliced_wasserstein2(jnp.asarray(x), jnp.asarray(y), key, directions=30)
    np.testing.assert_allclose(value, ref.sliced_wasserstein2(x, y, units(key, 30, 3)), rtol=1e-10)


def test_sliced_wasserstein2_is_below_the_exact_distance(x64):
    x, y = (jnp.asarray(ref.cloud(30, 3, seed=s)) for s in (0, 1))
    exact = diagnostics.wasserstein2(x, y)
    assert 0 < diagnostics.sliced_wasserstein2(x, y) < exact


def test_sliced_wasserstein2_of_a_shift(x64, key):
    """Unequal sizes of the same law, shifted by 3 in D = 2: close to 3 / sqrt(2)."""
    x = jax.random.normal(key, (3000, 2))
    y = jax.random.normal(jax.random.key(7), (2000, 2)) + jnp.array([3.0, 0.0])
    value = diagnostics.sliced_wasserstein2(x, y, directions=2000)
    np.testing.assert_allclose(value, 3 / np.sqrt(2), rtol=0.06)


# ------------------------------------------------------------------------------- Stein residuals and alarms


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_stein_residuals_equal_the_loop(x64, dim, kind):
    x, score = ref.cloud(11, dim), ref.cloud(11, dim, seed=1)
    residuals = diagnostics.stein_residuals(as_jax(x, kind), as_jax(score, kind))
    mean, matrix = ref.stein_residuals(x, score)
    np.testing.assert_allclose(residuals.mean, mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(residuals.matrix, matrix, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["array", "tree"])
def test_variance_ratio_is_the_diagonal_of_the_identity(x64, kind):
    x, score = ref.cloud(11, 3), ref.cloud(11, 3, seed=1)
    ratio = diagnostics.variance_ratio(as_jax(x, kind), as_jax(score, kind))
    leaves = jax.tree.leaves(ratio)
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])
    np.testing.assert_allclose(1 - flat, np.diag(ref.stein_residuals(x, score)[1]), rtol=1e-10)


@pytest.mark.parametrize("kind", ["array", "tree"])
def test_variance_ratio_of_a_gaussian_is_exact(x64, kind):
    x, sd = ref.cloud(11, 3), np.array([1.0, 3.0, 0.2])
    ratio = diagnostics.variance_ratio(as_jax(x, kind), as_jax(-x / sd**2, kind))
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(ratio)])
    np.testing.assert_allclose(flat, x.var(0) / sd**2, rtol=1e-10)


@pytest.mark.parametrize("kind", ["array", "tree"])
@pytest.mark.parametrize(
    ("shrink", "fires"), [(1.0, False), (0.8, False), (0.6, True), (0.1, True)]
)
def test_collapse_alarm_on_a_gaussian(shrink, fires, kind):
    x = shrink * np.random.default_rng(0).normal(size=(400, 12)).astype(np.float32)
    verdict = diagnostics.collapse(as_jax(x, kind), as_jax(-x, kind))
    assert verdict.collapsed is fires
    np.testing.assert_allclose(verdict.ratio, shrink**2, rtol=0.1)
    assert verdict.message.startswith("collapsed" if fires else "fine")


def test_collapse_alarm_on_svgd_in_high_dimension_and_not_on_calibrated_blob():
    """The case it was made for: D = 20, M = 40."""
    target, x = px.Target(lambda x: -0.5 * x @ x), jnp.asarray(ref.cloud(40, 20), jnp.float32)

    def verdict(flow):
        move = lambda state, _: (flow.step(jax.random.key(0), state)[0], None)
        state, _ = jax.jit(lambda s: jax.lax.scan(move, s, None, length=1000))(flow.init(x))
        return diagnostics.collapse(state.particles, -state.particles)

    assert verdict(px.svgd(target, step_size=0.5)).collapsed
    good = verdict(px.w_sgld_b(target, step_size=0.05, calibrate=True))
    assert not good.collapsed
    np.testing.assert_allclose(good.ratio, 1, rtol=0.01)


def test_collapse_threshold():
    x = jnp.asarray(ref.cloud(50, 3))
    ratio = diagnostics.collapse(x, -x).ratio
    assert diagnostics.collapse(x, -x, threshold=1.01 * ratio).collapsed
    assert not diagnostics.collapse(x, -x, threshold=0.99 * ratio).collapsed


def test_a_cloud_that_is_too_wide_is_told():
    x = jnp.asarray(ref.cloud(50, 3))
    verdict = diagnostics.collapse(3 * x, -3 * x)
    assert not verdict.collapsed
    assert verdict.message.startswith("too wide: the cloud has about")
    assert diagnostics.collapse(x, -x).message.startswith("fine")


def test_collapse_needs_two_particles():
    with pytest.raises(ParticleError, match="2 particles"):
        diagnostics.collapse(jnp.ones((1, 2)), jnp.ones((1, 2)))


def test_mode_shares_count_particles():
    density = zoo.GaussianMixture([[-5.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
    points = np.array([[-5.0, 0.1], [-4.9, 0.0], [5.0, 0.2], [-5.2, 0.3]])
    np.testing.assert_array_equal(
        diagnostics.mode_shares(jnp.asarray(points), density), [0.75, 0.25, 0.0]
    )


@pytest.mark.parametrize("name", ["U1", "U2", "U3", "U4"])
def test_mode_shares_of_a_sample_are_the_true_ones(name, key):
    density, num = getattr(zoo, name)(), 5000
    shares = diagnostics.mode_shares(density.sample(key, num), density)
    assert abs(shares.sum() - 1) < 1e-12
    error = 5 * np.sqrt(density.shares * (1 - density.shares) / num)
    assert np.all(np.abs(shares - density.shares) < error)


# ---------------------------------------------------------------------------------------- gradient noise


def regression(num, kind, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(num, 3)), rng.normal(size=num)
    like = lambda p, b: -0.5 * (b["x"] @ p["w"] + p["c"] - b["y"]) ** 2
    prior = lambda p: -0.5 * (jnp.sum(p["w"] ** 2) + p["c"] ** 2)
    target = px.Target(log_prior=prior, log_likelihood=like, num_data=num)
    return target, {"x": jnp.asarray(x, kind), "y": jnp.asarray(y, kind)}


def test_noise_ratio_is_the_formula(key):
    """2 eps / (eps^2 Var g), with the variance over the same batches from NumPy."""
    target, arrays = regression(400, jnp.float32)
    data = px.Minibatches(arrays, 20)
    cloud = {"w": jnp.asarray(ref.cloud(5, 3), jnp.float32), "c": jnp.arange(5.0) / 5}
    seen = diagnostics.noise_ratio(target, cloud, data, step_size=1e-3, key=key, batches=9)
    x, y = np.asarray(arrays["x"], float), np.asarray(arrays["y"], float)
    w, c = np.asarray(cloud["w"], float), np.asarray(cloud["c"], float)
    scores = []
    for step in range(9):
        rows = np.asarray(data.indices(key, jnp.array(step)))
        rest = y[rows] - w @ x[rows].T - c[:, None]
        scores.append(
            np.concatenate([20 * rest @ x[rows] - w, (20 * rest.sum(1) - c)[:, None]], axis=1)
        )
    variance = np.var(scores, axis=0, ddof=1).mean(0)
    found = np.append(np.asarray(seen["w"]), np.asarray(seen["c"]))
    np.testing.assert_allclose(found, 2 / (1e-3 * variance), rtol=1e-4)


def test_noise_ratio_of_networks_that_carry_something(key):
    """Random numbers of the target count as the minibatches do: here its slope is a normal number alone, of variance N / n."""

    def like(p, batch, carried, key):
        noise = jax.random.normal(key, batch.shape)
        return noise * p["w"], carried + 1.0

    prior = lambda p: -0.5 * p["w"] ** 2
    target = px.Target(log_prior=prior, log_likelihood=like, num_data=400, stateful=True)
    flow, data = px.sgld(target, step_size=0.1), px.Minibatches(jnp.zeros(400), 10)
    state = flow.init({"w": jnp.zeros(50)}, jnp.zeros(50))
    seen = diagnostics.noise_ratio(target, state, data, step_size=0.01, key=key, batches=400)
    np.testing.assert_allclose(seen["w"], 2 / (0.01 * 400**2 / 10), rtol=0.05)
    with pytest.raises(px.errors.OptionError, match="give the state"):
        diagnostics.noise_ratio(target, state.particles, data, step_size=0.01, key=key)


def test_noise_ratio_of_a_state_is_that_of_its_particles(key):
    """Shared leaves are where the state has them."""
    target, arrays = regression(400, jnp.float32)
    data = px.Minibatches(arrays, 20)
    cloud = {"w": jnp.asarray(ref.cloud(5, 3), jnp.float32), "c": jnp.full(5, 0.5)}
    options = {"step_size": 1e-3, "key": key, "batches": 9}
    plain = diagnostics.noise_ratio(target, cloud, data, **options)
    flow = px.svgd(target, step_size=0.1)
    whole = diagnostics.noise_ratio(target, flow.init(cloud), data, **options)
    state = flow.init({"w": cloud["w"], "c": None}, shared={"w": None, "c": jnp.float32(0.5)})
    partly = diagnostics.noise_ratio(target, state, data, **options)
    np.testing.assert_allclose(whole["w"], plain["w"], rtol=1e-6)
    np.testing.assert_allclose(partly["w"], plain["w"], rtol=1e-5)
    assert partly["c"] is None


def test_noise_ratio_tells_when_sgld_is_off(key):
    """Above 1 the chains' variance is the posterior's; far below it is the minibatches'."""
    target, arrays = regression(1000, jnp.float32)
    _, score = target.score({"w": jnp.zeros((1, 3)), "c": jnp.zeros(1)}, arrays)
    assert score["w"].shape == (1, 3)
    data = px.Minibatches(arrays, 100)
    for step, honest in ((2e-5, True), (1e-3, False)):
        flow = px.sgld(target, step_size=step)
        start = {"w": jnp.zeros((1, 3)), "c": jnp.zeros(1)}
        run = px.run(
            flow, start, steps=20000, key=key, data=data, thin=10, progress=False
        ).history  # one chain: others would share its batches
        assert run is not None
        spread = run.particles["w"][500:, 0].var(0) * 1001
        ratio = diagnostics.noise_ratio(target, start, data, step_size=step, key=key)["w"]
        assert bool(np.all(ratio > 5)) == honest
        assert bool(np.all(spread < 1.4)) == honest
        if not honest:
            assert np.all(ratio < 0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_size": 0.0}, "step_size is 0"),
        ({"batches": 1}, "batches is 1"),
        ({"data": "rows"}, "data is 'rows'"),
        ({"key": 3}, "key is 3"),
        ({"target": len}, "target is"),
    ],
)
def test_noise_ratio_refuses(change, words, key):
    target, arrays = regression(40, jnp.float32)
    given = {"target": target, "data": px.Minibatches(arrays, 10), "step_size": 0.1, "key": key}
    given |= {"particles": {"w": jnp.zeros((2, 3)), "c": jnp.zeros(2)}, **change}
    unchecked = inspect.unwrap(
        diagnostics.noise_ratio
    )  # as users have it, without the tests' type checks
    with pytest.raises(px.errors.ParticlaxError, match=words):
        unchecked(**given)


# ------------------------------------------------------------------------------------------- wrong inputs


X = jnp.asarray(ref.cloud(30, 2), jnp.float32)


@pytest.mark.parametrize("measure", ["ksd", "collapse", "stein_residuals", "variance_ratio"])
@pytest.mark.parametrize(
    ("score", "words"),
    [
        ((-X.sum(1), -X), r"target\.score.*take \[1\]"),
        (-X[:, :1], r"shapes \[\(30, 2\)\] and the scores \[\(30, 1\)\]"),
        (-X[:20], r"the scores \[\(20, 2\)\]"),
        ({"x": -X}, "expected one score for each particle"),
    ],
)
def test_scores_must_be_those_of_the_particles(measure, score, words):
    with pytest.raises(ParticleError, match=words):
        getattr(diagnostics, measure)(X, score)


def test_sets_must_be_of_one_space_and_finite():
    for measure in (diagnostics.mmd2, diagnostics.wasserstein2):
        with pytest.raises(ParticleError, match="D = 2 and D = 1"):
            measure(X, X[:, :1])
        with pytest.raises(ParticleError, match="same parameters"):
            measure({"a": X}, {"b": X})
        with pytest.raises(ParticleError, match=r"the second set.* is not finite"):
            measure(X, X * jnp.nan)
    plain = diagnostics.mmd2(X, X + 1)
    assert diagnostics.mmd2({"a": X}, X + 1) == pytest.approx(plain)
    with pytest.raises(ParticleError, match="1 particle"):
        diagnostics.mmd2(X, X[:1])
    with pytest.raises(px.errors.OptionError, match="kernel is"):
        inspect.unwrap(diagnostics.mmd2)(X, X, px.kernels.LayerWise())


def test_mode_shares_need_a_finite_cloud_of_the_density():
    with pytest.raises(ParticleError, match="not finite"):
        diagnostics.mode_shares(X * jnp.nan, zoo.U1())
    with pytest.raises(ParticleError, match="D = 3 and the density D = 2"):
        diagnostics.mode_shares(jnp.zeros((4, 3)), zoo.U1())


def test_collapse_in_one_direction_is_seen():
    """Correlated coordinates that have 30 % of their variance each, where the mean of the ratios is 70 %."""
    precision = np.linalg.inv(0.05 * np.eye(10) + 0.95)
    values, vectors = np.linalg.eigh(precision)
    scale = (
        np.where(values < 1, 0.1, 0.9) / values
    )  # the one wide direction has a tenth of its variance
    draws = np.random.default_rng(0).normal(size=(400, 10)) * np.sqrt(scale) @ vectors.T
    x = jnp.asarray(draws, jnp.float32)
    verdict = diagnostics.collapse(x, -x @ jnp.asarray(precision, jnp.float32))
    assert verdict.ratio > 0.7
    assert verdict.collapsed
    assert 0.05 < verdict.least < 0.15
    assert "in one direction" in verdict.message
    few = diagnostics.collapse(x[:30], -x[:30] @ jnp.asarray(precision, jnp.float32))
    assert np.isnan(few.least)


def test_draws_of_the_target_are_not_taken_for_collapsed():
    for num, dim, seed in [(100, 10, 0), (50, 2, 1), (400, 50, 2), (9, 2, 3)]:
        x = jnp.asarray(np.random.default_rng(seed).normal(size=(num, dim)), jnp.float32)
        assert not diagnostics.collapse(x, -x).collapsed


def test_collapse_speaks_up_for_what_is_not_finite():
    lost = jnp.full((5, 2), jnp.nan)
    verdict = diagnostics.collapse(lost, lost)
    assert verdict.collapsed
    assert "NaN or infinite" in verdict.message
