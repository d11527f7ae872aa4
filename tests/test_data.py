"""Minibatches: permutations evaluated where needed, a pure function of key and step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import particlax as px
from particlax import data
from particlax.data import permuted

SIZES = [1, 2, 3, 5, 7, 10, 64, 65, 1000]


@pytest.mark.parametrize("num", SIZES)
def test_permuted_is_a_bijection(num):
    keys = jax.random.split(jax.random.key(num), 20)
    images = jax.jit(jax.vmap(lambda k: permuted(k, jnp.arange(num), num)))(keys)
    for image in np.asarray(images):
        assert sorted(image) == list(range(num))
    if num >= 64:
        assert len({tuple(image) for image in np.asarray(images).tolist()}) == 20
        assert not any((image == np.arange(num)).all() for image in np.asarray(images))


def test_permuted_pointwise_equals_whole(key):
    """Each position alone gives what it gives among the others."""
    whole = permuted(key, jnp.arange(37), 37)
    alone = [int(permuted(key, jnp.array([i]), 37)[0]) for i in range(37)]
    assert whole.tolist() == alone


def chi_square(counts):
    """The p-value of equal probabilities."""
    return stats.chisquare(np.asarray(counts).ravel()).pvalue


@pytest.mark.parametrize("num", [2, 3, 5, 7, 10, 16, 33, 64])
def test_each_position_is_uniform_over_keys(num):
    keys = jax.random.split(jax.random.key(1), 300 * num)
    images = np.asarray(jax.jit(jax.vmap(lambda k: permuted(k, jnp.arange(num), num)))(keys))
    for position in {0, 1, num // 2, num - 1}:
        assert chi_square(np.bincount(images[:, position], minlength=num)) > 1e-4


@pytest.mark.parametrize("num", [5, 7, 10, 16, 20])
def test_consecutive_positions_are_uniform_over_pairs(num):
    keys = jax.random.split(jax.random.key(2), 50 * num * (num - 1))
    images = np.asarray(jax.jit(jax.vmap(lambda k: permuted(k, jnp.arange(num), num)))(keys))
    for position in (0, num // 2 - 1, num - 2):
        counts = np.zeros((num, num))
        np.add.at(counts, (images[:, position], images[:, position + 1]), 1)
        assert np.all(np.diag(counts) == 0)
        assert chi_square(counts[~np.eye(num, dtype=bool)]) > 1e-4


def epoch(data, key, number):
    count = data.batches_per_epoch
    steps = range(number * count, (number + 1) * count)
    return np.concatenate([np.asarray(data.indices(key, jnp.array(step))) for step in steps])


@pytest.mark.parametrize(("num", "size"), [(12, 4), (12, 5), (10, 10), (7, 1), (100, 33), (1, 1)])
def test_epochs_visit_rows_once(num, size, key):
    data = px.Minibatches(jnp.arange(float(num)), size)
    assert data.batches_per_epoch == num // size
    for number in range(3):
        rows = epoch(data, key, number)
        assert len(set(rows)) == len(rows) == num // size * size
        assert rows.min() >= 0
        assert rows.max() < num


def test_rows_left_out_change_with_the_epoch(key):
    data = px.Minibatches(jnp.arange(12.0), 5)
    left = {frozenset(set(range(12)) - set(epoch(data, key, number))) for number in range(10)}
    assert len(left) > 3


def test_epochs_and_keys_differ(key):
    data = px.Minibatches(jnp.arange(50.0), 10)
    orders = [tuple(epoch(data, key, number)) for number in range(4)]
    orders += [tuple(epoch(data, jax.random.key(seed), 0)) for seed in range(1, 4)]
    assert len(set(orders)) == 7


def test_batch_depends_on_key_and_step_alone(key):
    data = px.Minibatches(jnp.arange(50.0), 10)
    forward = [np.asarray(data.batch(key, jnp.array(step))) for step in range(12)]
    again = px.Minibatches(jnp.arange(50.0), 10)
    jitted = eqx.filter_jit(again.batch)
    for step in reversed(range(12)):
        assert np.array_equal(again.batch(key, jnp.array(step)), forward[step])
        assert np.array_equal(jitted(key, jnp.array(step)), forward[step])


def test_rows_stay_together_in_pytrees(key):
    data = px.Minibatches({"x": np.arange(20.0).reshape(10, 2), "deep": (np.arange(10),)}, 4)
    assert data.num_data == 10
    for step in range(5):
        batch, rows = data.batch(key, jnp.array(step)), data.indices(key, jnp.array(step))
        assert np.array_equal(batch["deep"][0], rows)
        assert np.array_equal(batch["x"], np.arange(20.0).reshape(10, 2)[np.asarray(rows)])
        assert batch["deep"][0].dtype == jnp.int32


@pytest.mark.parametrize("size", [1, data.FEW, data.FEW + 1])
def test_rows_of_few_and_of_many(size):
    """A CPU copies few one by one."""
    rng = np.random.default_rng(size)
    arrays = {
        "x": rng.normal(size=(300, 3, 2)),
        "y": rng.integers(0, 9, 300),
        "z": rng.random(300) > 0.5,
    }
    rows = rng.integers(0, 300, size)
    found = jax.jit(data.taken)(jax.tree.map(jnp.asarray, arrays), jnp.asarray(rows))
    for name, leaf in arrays.items():
        np.testing.assert_array_equal(found[name], jnp.asarray(leaf)[rows])
    before = data.taken._cache_size()
    for shift in (0, 1):
        data.taken(jax.tree.map(jnp.asarray, arrays), jnp.asarray((rows + shift) % 300))
    assert data.taken._cache_size() <= before + 1  # compiled once, for calls of one's own
    looped = "while" in jax.jit(data.taken).lower(arrays, jnp.asarray(rows)).as_text()
    assert looped == (size <= data.FEW and jax.default_backend() == "cpu")


def test_works_inside_scan_and_vmap(key):
    data = px.Minibatches(jnp.arange(20.0), 5)
    _, scanned = jax.lax.scan(lambda c, t: (c, data.batch(key, t)), None, jnp.arange(8))
    mapped = jax.vmap(lambda t: data.batch(key, t))(jnp.arange(8))
    assert np.array_equal(scanned, mapped)


def test_late_steps_do_not_overflow(key):
    data = px.Minibatches(jnp.arange(60_000), 128)
    rows = np.asarray(data.indices(key, jnp.array(2**31 - 1, jnp.int32)))
    assert len(set(rows)) == 128
    assert rows.min() >= 0
    assert rows.max() < 60_000


@pytest.mark.parametrize("num", [257, 1000])
def test_large_sets_are_permuted_evenly(num):
    """Positions, neighbours' differences, fixed points and order are as in uniform permutations."""
    keys = jax.random.split(jax.random.key(3), 40_000)
    few = jnp.array([0, 1, num // 2, num - 1])
    images = np.asarray(jax.jit(jax.vmap(lambda k: permuted(k, few, num)))(keys))
    for place in range(4):
        assert chi_square(np.bincount(images[:, place], minlength=num)) > 1e-4
    apart = (images[:, 1] - images[:, 0]) % num
    assert chi_square(np.bincount(apart, minlength=num)[1:]) > 1e-4
    whole = jax.jit(jax.vmap(lambda k: permuted(k, jnp.arange(num), num)))(keys[:2000])
    fixed = np.sum(np.asarray(whole) == np.arange(num), 1)  # Poisson of mean 1
    assert abs(fixed.mean() - 1) < 5 / np.sqrt(2000)
    assert abs(fixed.var() - 1) < 10 / np.sqrt(2000)
    order = [stats.spearmanr(image, np.arange(num))[0] for image in np.asarray(whole[:500])]
    assert abs(np.std(order) * np.sqrt(num - 1) - 1) < 0.16  # five standard errors


# ---------------------------------------------------------------------------------------------- transforms


def jitter(key, batch):
    return {**batch, "x": batch["x"] + jax.random.normal(key, batch["x"].shape)}


def test_transform_has_a_key_for_each_step(key):
    arrays = {"x": jnp.zeros(20), "y": jnp.arange(20)}
    data, plain = px.Minibatches(arrays, 5, jitter), px.Minibatches(arrays, 5)
    seen = [data.batch(key, jnp.array(step)) for step in range(6)]
    for step, batch in enumerate(seen):
        assert np.array_equal(batch["y"], plain.batch(key, jnp.array(step))["y"])
        assert np.array_equal(batch["x"], data.batch(key, jnp.array(step))["x"])
    assert len({tuple(batch["x"].tolist()) for batch in seen}) == 6


def test_run_sees_transformed_batches(key):
    """A transform that negates the data is a run on negated data."""
    target = px.Target(
        log_prior=lambda m: -0.5 * m**2,
        log_likelihood=lambda m, batch: -0.5 * (batch - m) ** 2,
        num_data=20,
    )
    flow, rows = px.sgld(target, step_size=1e-2), jnp.arange(20.0)
    start = jnp.zeros(3)
    one = px.run(
        flow, start, steps=9, key=key, data=px.Minibatches(rows, 5, lambda k, b: -b), progress=False
    )
    two = px.run(flow, start, steps=9, key=key, data=px.Minibatches(-rows, 5), progress=False)
    assert np.array_equal(one.particles, two.particles)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_data_must_be_finite(bad):
    x = np.ones((10, 3))
    x[7, 1] = bad
    with pytest.raises(px.errors.DataError, match=r"row 7 of the data\['x'\] is not finite"):
        px.Minibatches({"x": x, "y": np.arange(10)}, 2)


def test_transform_must_be_a_function():
    with pytest.raises(px.errors.DataError, match="transform is 3; expected a function"):
        px.Minibatches(np.ones(10), 2, 3)
