"""Pair sums: against double loops, tiled against dense, per leaf against flat, and in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import blocks, kernels, medians, pairwise
from particlax.diffusions import GFSD, Blob, Langevin, Sinkhorn, Transport

from . import references as ref

LAYOUTS = [(3, "array"), (3, "tree"), (12, "array"), (12, "tree")]


def as_jax(matrix, kind="array"):
    return jax.tree.map(jnp.asarray, ref.layout(matrix, kind))


def inputs(num=13, columns=9, dim=3, kind="array"):
    x, y, v = (ref.cloud(n, dim, seed) for n, seed in ((num, 1), (columns, 2), (columns, 3)))
    rng = np.random.default_rng(4)
    return x, y, v, rng.normal(size=num), rng.normal(size=columns)


def pair(r2, own, other):
    return jnp.exp(-r2 / 3) * (1 + own), jnp.sin(r2) * (own - 2 * other)


def pair_reference(x, y, v, own, other):
    r2, out = ref.sqdist(x, y), np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(y)):
            out[i] += np.exp(-r2[i, j] / 3) * (1 + own[i]) * v[j]
            out[i] += np.sin(r2[i, j]) * (own[i] - 2 * other[j]) * (x[i] - y[j])
    return out


def compute(x, y, v, own, other):
    """Every sum of the module on one input, by name."""
    return {
        "interact": pairwise.interact(x, y, pair, values=v, rows=(own,), cols=(other,)),
        "alone": pairwise.interact(x, y, lambda r2: 1 / (1 + r2)),
        "total": pairwise.total(x, y, lambda r2, a, b: r2 * a + b, rows=(own,), cols=(other,)),
        "logsumexp": pairwise.logsumexp(x, y, lambda r2, b: b - r2, cols=(other,)),
    }


def both_medians(x, y, v, own, other):
    return {
        "median": medians.median_sqdist(x),
        "itself": medians.median_sqdist(x, itself=True, of_squares=True),
    }


def all_sums(arguments, kind="array", *, what=compute, jit=True):
    x, y, v, own, other = arguments
    clouds = [as_jax(a, kind) for a in (x, y, v)]
    # A new function every time: constants of the module are read when it is traced.
    function = jax.jit(functools.partial(what)) if jit else what
    sums = function(*clouds, jnp.asarray(own), jnp.asarray(other))
    cloudy = ("interact", "alone")
    return {k: ref.matrix_of(v) if k in cloudy else np.asarray(v) for k, v in sums.items()}


def same(left, right, tolerance):
    assert left.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(left[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_sqdist(x64, dim, kind):
    x, y, *_ = inputs(dim=dim)
    r2 = pairwise.sqdist(as_jax(x, kind), as_jax(y, kind))
    np.testing.assert_allclose(r2, ref.sqdist(x, y), rtol=1e-12)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(("dim", "kind"), LAYOUTS)
def test_every_sum_equals_the_double_loop(x64, dim, kind, jit):
    x, y, v, own, other = inputs(dim=dim)
    r2 = ref.sqdist(x, y)
    alone = [sum((x[i] - y[j]) / (1 + r2[i, j]) for j in range(len(y))) for i in range(len(x))]
    expected = {
        "interact": pair_reference(x, y, v, own, other),
        "alone": np.stack(alone),
        "total": np.array([sum(r2[i] * own[i] + other) for i in range(len(x))]),
        "logsumexp": np.array([np.log(sum(np.exp(other - r2[i]))) for i in range(len(x))]),
    }
    same(all_sums((x, y, v, own, other), kind, jit=jit), expected, 1e-10)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(("dim", "kind"), [(3, "array"), (12, "tree")])
def test_medians_equal_those_of_numpy(x64, dim, kind, jit):
    x, *others = inputs(num=12, dim=dim)
    expected = {"median": ref.median_sqdist(x), "itself": np.median(ref.sqdist(x, x))}
    same(all_sums((x, *others), kind, what=both_medians, jit=jit), expected, 1e-10)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_median_of_an_even_number_of_pairs_averages_the_two_middle_ones(x64, jit):
    """Many small clouds, because a wrong middle pair shows only in some of them."""
    function = jax.jit(medians.median_sqdist) if jit else medians.median_sqdist
    for seed in range(20):
        x = ref.cloud(8, 3, seed)
        np.testing.assert_allclose(
            function(jnp.asarray(x)), ref.median_sqdist(x), rtol=1e-10, err_msg=f"seed {seed}"
        )


@pytest.mark.parametrize("elements", [1, 150])
@pytest.mark.parametrize("dim", [3, 12])
def test_strips_equal_the_whole(x64, monkeypatch, dim, elements):
    """37 rows: in strips of one row and of heights that do not divide 37."""
    arguments = inputs(num=37, columns=23, dim=dim)
    whole = all_sums(arguments)
    monkeypatch.setitem(pairwise.STRIP_ELEMENTS, "cpu", elements)
    same(all_sums(arguments), whole, 1e-12)


@pytest.mark.parametrize("dim", [3, 12])
def test_median_in_strips_equals_the_whole(x64, monkeypatch, dim):
    arguments = inputs(num=37, dim=dim)
    whole = all_sums(arguments, what=both_medians)
    monkeypatch.setitem(pairwise.STRIP_ELEMENTS, "cpu", 150)
    same(all_sums(arguments, what=both_medians), whole, 1e-12)


def test_strips_are_no_higher_than_asked(monkeypatch):
    monkeypatch.setitem(pairwise.STRIP_ELEMENTS, "cpu", 100)
    heights = []

    def strip(rows):
        heights.append(len(rows))
        return rows

    out = pairwise.reduce_rows(strip, jnp.arange(37.0), 23)
    np.testing.assert_array_equal(out, np.arange(37.0))
    assert set(heights) == {4}


@pytest.mark.parametrize("elements", [1 << 20, 100], ids=["whole", "strips"])
@pytest.mark.parametrize("dim", [3, 12])
def test_leaf_by_leaf_equals_flat(x64, monkeypatch, dim, elements):
    arguments = inputs(num=37, columns=23, dim=dim)
    flat = all_sums(arguments, kind="tree")
    monkeypatch.setattr(blocks, "FLAT_DIM", 1)
    monkeypatch.setitem(pairwise.STRIP_ELEMENTS, "cpu", elements)
    same(all_sums(arguments, kind="tree"), flat, 1e-11)


def test_median_leaf_by_leaf_equals_flat(x64, monkeypatch):
    arguments = inputs(num=13, dim=12)
    flat = all_sums(arguments, kind="tree", what=both_medians)
    monkeypatch.setattr(blocks, "FLAT_DIM", 1)
    same(all_sums(arguments, kind="tree", what=both_medians), flat, 1e-11)


def test_logsumexp_neither_overflows_nor_underflows():
    x = jnp.array([[0.0], [1.0]])
    high = pairwise.logsumexp(x, x, lambda r2: 1000 - r2)
    low = pairwise.logsumexp(x, x, lambda r2: -1000 - r2)
    np.testing.assert_allclose(high, 1000 + np.log1p(np.exp(-1)), rtol=1e-6)
    np.testing.assert_allclose(low, -1000 + np.log1p(np.exp(-1)), rtol=1e-6)


def tight_errors(dim, num=60):
    """Largest relative errors in float32 of a cloud of spread 0.01 around 1, over distinct pairs."""
    rng = np.random.default_rng(5)
    x = (1 + 0.01 * rng.normal(size=(num, dim))).astype(np.float32)
    exact, h = ref.sqdist(*[x.astype(np.float64)] * 2), 1e-4 * dim
    apart = ~np.eye(num, dtype=bool)
    cloud = jnp.asarray(x)
    r2 = np.asarray(pairwise.sqdist(cloud, cloud), np.float64)
    force = np.asarray(pairwise.interact(cloud, cloud, lambda r2: jnp.exp(-r2 / h)), np.float64)
    wide = x.astype(np.float64)
    true_force = np.stack([np.exp(-exact[i] / h) @ (wide[i] - wide) for i in range(num)])
    median = float(jax.jit(medians.median_sqdist)(cloud))
    return {
        "r2": (np.abs(r2 - exact)[apart] / exact[apart]).max(),
        "force": np.abs(force - true_force).max() / np.abs(true_force).max(),
        "median": abs(median / ref.median_sqdist(wide) - 1),
    }


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("dim", "mean", "far"), [(1, 1e4, 0), (1, 5, 0), (1, 0, 1e5), (2, 1e4, 0), (2, 0, 1e6), (16, 1e4, 0), (16, 0, 1e5)])  # fmt: skip
def test_forces_far_from_the_origin_and_beside_a_particle_far_away(dim, mean, far, jit):
    """In float32: a cloud with a mean, and one of whose particles is far away, which is then left out."""
    x = (mean + np.random.default_rng(6).normal(size=(65, dim))).astype(np.float32)
    x[10] += np.float32(far)
    wide, h = x.astype(np.float64), 1.5 * dim
    weights = lambda r2: jnp.exp(-r2 / h)
    force = lambda x: pairwise.interact(x, x, weights)
    found = (jax.jit(force) if jit else force)(jnp.asarray(x))
    matrix = np.exp(-ref.sqdist(wide, wide) / h)
    truth = np.stack([row @ (one - wide) for row, one in zip(matrix, wide, strict=True)])
    others = np.arange(65) != (10 if far else -1)
    error = np.abs(np.asarray(found, np.float64) - truth)[others].max()
    assert error < 2e-6 * np.abs(truth[others]).max()


def test_a_particle_far_away_leaves_the_median_alone():
    for dim in (2, 16):
        x = np.random.default_rng(7).normal(size=(60, dim)).astype(np.float32)
        x[0] = 1e6
        h = float(kernels.Median()(jnp.asarray(x)))
        wide = x.astype(np.float64)
        np.testing.assert_allclose(h, ref.median_sqdist(wide) / np.log(60), rtol=1e-5)


@pytest.mark.parametrize("place", [0, 3, 10, 19])
@pytest.mark.parametrize(("centre", "other"), [(1e4, 0.0), (1e4, 1.0), (1e4, -1e4), (1e9, 0.0)])
def test_a_collapsed_cloud_and_a_particle_near_the_origin(centre, other, place, key):
    """Distances are rounding, whatever one particle is: the bandwidth's floor keeps forces small and finite."""
    noise = 1e-3 * np.random.default_rng(0).integers(-1, 2, (20, 2))
    x = (centre + noise).astype(np.float32)
    x[place] = other
    square = float(pairwise.typical_square(jnp.asarray(x)))
    np.testing.assert_allclose(square, 2 * centre**2, rtol=1e-4)
    target = px.Target(lambda x: -0.5 * jnp.sum((x - centre) ** 2))
    flow = px.svgd(target, step_size=0.1)
    with jax.debug_infs(True):
        moved = flow.step(key, flow.init(x))[0].particles
    others = np.arange(20) != place
    assert np.abs(np.asarray(moved, float) - x)[others].max() < 1e-4 * centre
    assert np.all(np.isfinite(moved))


def test_derivatives_with_a_particle_at_the_origin(key):
    flow = px.svgd(px.Target(lambda x: -0.5 * jnp.sum(x**2)), step_size=0.1)
    x = jax.random.normal(key, (10, 2)).at[3].set(0.0)
    moved = lambda x: jnp.sum(flow.step(key, flow.init(x))[0].particles ** 2)
    assert np.all(np.isfinite(jax.grad(moved)(x)))


@pytest.mark.parametrize("setting", ["numpy_rank_promotion", "numpy_dtype_promotion"])
def test_strict_settings_of_jax(setting, key):
    """Programs that forbid promotions of shapes or types use these samplers too."""
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    euler, some = px.integrators.Euler(0.01), [px.Drift(), px.Stein()]
    flows = [
        *[px.Flow(target, [*some, make()], euler) for make in (Langevin, Blob, GFSD, Transport)],
        *[px.svgd(target, kernel=make(), step_size=0.1) for make in (kernels.IMQ, kernels.LayerWise)],
        px.svgd(target, kernel=kernels.RBF(kernels.HeatEquation()), step_size=0.1),
        px.w_sgld(target, coupling=Sinkhorn(), step_size=0.1),
        px.calibrated(target),
        px.Flow(target, [px.Drift(), Blob(calibrate=True)], euler, metric=px.metrics.Diagonal()),
        px.sgld(target, integrator=px.integrators.RMS(0.01)),
        px.sghmc(target, step_size=0.01),
    ]  # fmt: skip
    context = getattr(jax, setting)("raise" if "rank" in setting else "strict")
    for kind in (jnp.float32, jnp.float16):
        for flow in flows:
            with context:
                result = px.run(flow, jax.random.normal(key, (20, 3), kind), steps=2, key=key, progress=False)  # fmt: skip
            assert result.particles.dtype == kind


TIGHT = {
    3: {"r2": 6e-7, "force": 1.2e-6, "median": 5e-7},
    20: {"r2": 2.4e-6, "force": 1.2e-6, "median": 5e-7},
}
"""Measured: 1.2e-7, 2.4e-7, 5e-8 and 4.7e-7, 2.2e-7, 4e-8; the module promises 6e-6 for D = 20."""


@pytest.mark.parametrize("dim", [3, 20])
def test_float32_of_a_tight_cloud(dim):
    errors = tight_errors(dim)
    for quantity, bound in TIGHT[dim].items():
        assert errors[quantity] < bound, (quantity, errors)


def test_far_from_the_origin_nothing_changes():
    """Shifts by a power of two are exact in float32 here, so both answers must agree closely."""
    rng = np.random.default_rng(6)
    x = rng.integers(-64, 64, (20, 12)).astype(np.float32) / 64
    near, far = jnp.asarray(x), jnp.asarray(x + np.float32(1024))
    a, b = (np.asarray(pairwise.sqdist(c, c)) for c in (near, far))
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dim", [3, 12])
def test_bfloat16_is_computed_in_float32(dim):
    x = jnp.asarray(ref.cloud(20, dim), jnp.bfloat16)
    wide = x.astype(jnp.float32)
    weights = lambda r2: jnp.exp(-r2 / dim)
    assert pairwise.sqdist(x, x).dtype == jnp.float32
    np.testing.assert_array_equal(pairwise.sqdist(x, x), pairwise.sqdist(wide, wide))
    assert medians.median_sqdist(x) == medians.median_sqdist(wide)
    narrow, full = pairwise.interact(x, x, weights), pairwise.interact(wide, wide, weights)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, full.astype(jnp.bfloat16))


def test_median_of_a_collapsed_cloud_is_zero():
    assert float(medians.median_sqdist(jnp.ones((6, 2)))) == 0


def test_median_with_many_equal_distances(x64):
    x = np.array([[0.0], [0.0], [0.0], [1.0], [1.0], [5.0]])
    assert float(medians.median_sqdist(jnp.asarray(x))) == ref.median_sqdist(x)


@pytest.mark.parametrize("num", [2, 3, 4, 5, 20, 21])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("of_squares", [False, True])
def test_the_median_by_a_sort_is_the_same(num, itself, of_squares, monkeypatch):
    """Accelerators sort the upper half of the distances where the CPU searches it."""
    x = jnp.asarray(ref.cloud(num, 3), jnp.float32)
    searched = medians.median_sqdist(x, itself=itself, of_squares=of_squares)
    monkeypatch.setattr(pairwise.jax, "default_backend", lambda: "gpu")
    by_sort = medians.median_sqdist(x, itself=itself, of_squares=of_squares)
    np.testing.assert_array_equal(searched, by_sort)


@pytest.mark.parametrize(("num", "dim"), [(1, 3), (7, 2), (100, 55), (700, 3)])
@pytest.mark.parametrize("centre", [0.0, 100.0])
def test_weights_in_one_ratio_give_the_same_sum(num, dim, centre):
    rng = np.random.default_rng(0)
    x, s = (rng.normal(size=(num, dim)) for _ in range(2))
    x = (x + centre).astype(np.float32)
    h = jnp.float32(dim)
    pair = lambda r2: (jnp.exp(-r2 / h), (2 / h) * jnp.exp(-r2 / h))
    args = (jnp.asarray(x), jnp.asarray(s, jnp.float32))
    found = pairwise.interact(args[0], args[0], pair, values=args[1], ratio=2 / h)
    wide = x.astype(float)
    k = np.exp(-np.sum((wide[:, None] - wide) ** 2, -1) / dim)
    truth = k @ s + 2 / dim * (k.sum(1)[:, None] * wide - k @ wide)
    away = 1 + centre * 1e-2  # float32 rounds the starting points
    np.testing.assert_allclose(found, truth, atol=2e-5 * away * np.abs(truth).max())
    slope = lambda ratio: jax.grad(
        lambda x: jnp.sum(pairwise.interact(x, x, pair, values=args[1], ratio=ratio) ** 2)
    )(args[0])
    one, two = slope(2 / h), slope(None)
    np.testing.assert_allclose(one, two, atol=1e-3 * float(jnp.abs(two).max()))


def test_clouds_without_coordinates():
    np.testing.assert_array_equal(pairwise.sqdist(jnp.zeros((6, 0)), jnp.zeros((4, 0))), 0.0)
