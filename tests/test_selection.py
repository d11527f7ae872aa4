"""Selection by rank against NumPy's sort, on numbers that are easy and on numbers that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from particlax import circle, medians, selection
from tests import references as ref

COMPILE_FAST = True

RNG = np.random.default_rng(0)
CASES = {
    "smooth": RNG.normal(size=3000) ** 2,
    "heavy tails": RNG.standard_cauchy(3001) ** 2,
    "a gap at the middle": np.concatenate([RNG.random(500), 1e4 + RNG.random(500)]),
    "ties": RNG.integers(0, 5, 1000).astype(float),
    "two values": np.repeat([0.0, 3.0], 50),
    "all equal": np.full(70, 2.5),
    "zeros": np.zeros(64),
    "powers": 2.0 ** RNG.integers(-100, 100, 777),
    "infinities": np.concatenate([RNG.random(100), np.full(30, np.inf)]),
    "two": np.array([4.0, 1.0]),
}


def counting(numbers):
    """Passes over numbers, and a list that grows by one in each."""
    passes = []

    def look(pivot):
        jax.debug.callback(lambda: passes.append(1))
        return jnp.sum(numbers <= pivot), jnp.min(jnp.where(numbers > pivot, numbers, jnp.inf))

    return look, passes


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, np.float32) for name in CASES), ("smooth", np.float64), ("powers", np.float64)],
)
def test_adjacent_numbers_by_rank(x64, name, kind):
    """At both ends, in the middle and between, from a good sample and from a bad one."""
    numbers = CASES[name].astype(kind)
    ordered, total = np.sort(numbers), len(numbers)
    for sample in (jnp.asarray(numbers[:64]), jnp.full(3, numbers.max())):
        look, passes = counting(jnp.asarray(numbers))
        for place in {(total - 1) // 3, total - 2}:
            found = jax.jit(selection.adjacent, static_argnums=(0, 1, 2))(
                look, total, place, sample
            )
            assert [float(n) for n in found] == [ordered[place], ordered[place + 1]], place
        jax.effects_barrier()
        assert len(passes) <= 2 * (100 if kind == np.float32 else 200)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_short_ways_agree(x64, name, kind):
    numbers = CASES[name].astype(kind)
    ordered = np.sort(numbers)
    for place in {0, len(numbers) // 2 - 1, len(numbers) - 2}:
        wanted = [ordered[place], ordered[place + 1]]
        for way in (selection.narrowed, selection.by_sort):
            found = jax.jit(way, static_argnums=1)(jnp.asarray(numbers), place)
            assert [n.dtype for n in found] == [kind] * 2
            assert [float(n) for n in found] == wanted


def test_narrowing_many_at_once():
    """Under vmap, where each takes another number of passes."""
    numbers = np.stack([np.resize(some, 500) for some in CASES.values()]).astype(np.float32)
    found = jax.jit(jax.vmap(lambda some: selection.narrowed(some, 249)))(jnp.asarray(numbers))
    np.testing.assert_array_equal(np.stack(found, 1), np.sort(numbers, 1)[:, 249:251])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, -0.0])
def test_narrowing_ends_whatever_the_numbers_are(bad):
    numbers = np.where(np.arange(200) % 3 == 0, bad, CASES["smooth"][:200]).astype(np.float32)
    narrowed = jax.jit(selection.narrowed, static_argnums=1)
    found = [float(n) for n in narrowed(jnp.asarray(numbers), 40)]
    finite = np.abs(numbers[np.isfinite(numbers)])  # NaN are the last
    assert found == np.sort(finite)[40:42].tolist()
    assert all(np.isnan(n) for n in narrowed(jnp.full(9, bad), 4)) == np.isnan(bad)


def test_some_ten_passes_for_a_cloud():
    r2 = ref.sqdist(*[RNG.normal(size=(300, 2))] * 2)[np.triu_indices(300, 1)]
    look, passes = counting(jnp.asarray(r2, jnp.float32))
    selection.adjacent(look, len(r2), len(r2) // 2, jnp.asarray(r2[::97], jnp.float32))
    jax.effects_barrier()
    assert 5 < len(passes) < 25


@pytest.mark.parametrize("num", [2, 3, 17, 18, 40])
@pytest.mark.parametrize("chunk", [16, 2048])
def test_the_circle_has_every_pair_once(x64, monkeypatch, num, chunk):
    monkeypatch.setattr(circle, "CHUNK", chunk)
    x = RNG.normal(size=(num, 3))
    r2 = np.sort(ref.sqdist(x, x)[np.triu_indices(num, 1)])
    look = jax.jit(circle.look(jnp.asarray(x)))
    for place in {0, len(r2) // 2, len(r2) - 1}:
        count, least = look(jnp.asarray(r2[place] * (1 + 1e-12)))
        assert int(count) == place + 1
        following = r2[place + 1] if place + 1 < len(r2) else np.inf
        np.testing.assert_allclose(float(least), following, rtol=1e-12)


@pytest.mark.parametrize("num", [520, 521])
@pytest.mark.parametrize("dim", [1, 2, 8, 9])
@pytest.mark.parametrize("itself", [False, True])
def test_median_of_a_cloud_too_large_to_keep(x64, monkeypatch, num, dim, itself):
    """By the circle up to 8 dimensions and in strips above."""
    monkeypatch.setattr(medians, "HALF_ELEMENTS", 1000)
    x = RNG.normal(size=(num, dim)) + 10
    r2 = ref.sqdist(x, x)
    wanted = np.median(r2) if itself else np.median(np.sqrt(r2[np.triu_indices(num, 1)])) ** 2
    found = medians.median_sqdist(jnp.asarray(x), itself=itself, of_squares=itself)
    np.testing.assert_allclose(float(found), wanted, rtol=1e-11)


def test_median_has_no_gradient():
    x = jnp.asarray(RNG.normal(size=(600, 2)), jnp.float32)
    assert not np.any(jax.grad(medians.median_sqdist)(x))
