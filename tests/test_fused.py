"""Fused kernels for large clouds: their bodies, interpreted on small tiles, against NumPy in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from benchmarks import absent
from particlax import formula, fused, gpu, kernels, medians, pairwise, radix
from particlax.diffusions import GFSD, Blob, Transport
from particlax.terms import Cloud, Frame

from . import references as ref

COMPILE_FAST = True


@pytest.fixture
def kernel(monkeypatch):
    """Every sum goes through the kernels, on tiles so small that every loop turns more than once."""
    monkeypatch.setattr(gpu, "MODE", "interpret")
    monkeypatch.setattr(fused, "LEAST", 1)
    monkeypatch.setattr(fused, "TILES", {8: fused.Tile(16, 4, 4), 64: fused.Tile(16, 8, 4)})
    monkeypatch.setattr(fused, "PROGRAMS", (6, 6))
    monkeypatch.setattr(fused, "RUN", 16)
    monkeypatch.setattr(radix, "LEAST", 1)
    monkeypatch.setattr(radix, "BLOCK", 16)
    monkeypatch.setattr(radix, "PROGRAMS", 2)
    monkeypatch.setattr(radix, "MOST", 3)


def relative(found, truth):
    return np.abs(np.asarray(found, float) - truth).max() / np.abs(truth).max()


def jitted(function):
    """A new function every time: constants of the modules are read when it is traced."""
    return jax.jit(functools.partial(function))


def as_floats(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def sums(x, y, v, own, other, h, *, some=False):
    """Every kind of sum that the library makes: one tile or two, with and without values, rows and columns."""
    rbf = pairwise.interact(x, y, lambda r2: kernels.RBF().pair(r2, h), values=v)
    if some:
        return {"rbf": rbf}
    return {
        "rbf": rbf,
        "imq": pairwise.interact(x, y, lambda r2: kernels.IMQ().pair(r2, h), values=v),
        "blob": pairwise.interact(
            x, y, lambda r2, a, b: jnp.exp(-r2 / h) * (a + b), rows=(own,), cols=(other,)
        ),
        "total": pairwise.total(
            x, y, lambda r2, a, b: jnp.sin(r2 / h) * a + b, rows=(own,), cols=(other,)
        ),
        "logsumexp": pairwise.logsumexp(x, y, lambda r2, b: b - r2 / h, cols=(other,)),
    }


def references(x, y, v, own, other, h):
    r2 = ref.sqdist(x, y)
    force = lambda b: b.sum(1, keepdims=True) * x - b @ y
    rbf, imq = ref.rbf(r2 / h), ref.imq(r2 / h)
    return {
        "rbf": rbf[0] @ v + force(-2 / h * rbf[1]),
        "imq": imq[0] @ v + force(-2 / h * imq[1]),
        "blob": force(np.exp(-r2 / h) * (own[:, None] + other[None, :])),
        "total": np.sum(np.sin(r2 / h) * own[:, None] + other[None, :], 1),
        "logsumexp": np.log(np.sum(np.exp(other[None, :] - r2 / h), 1)),
    }


def arguments(num, columns, dim, centre=0.0, spread=1.0):
    x, y = (ref.cloud(n, dim, k, spread, centre) for k, n in ((1, num), (2, columns)))
    v = ref.cloud(columns, dim, 3)
    rng = np.random.default_rng(4)
    x, y, v = (np.asarray(a, np.float32).astype(float) for a in (x, y, v))
    return x, y, v, rng.normal(size=num), rng.normal(size=columns), 2.0 * dim * spread**2


SHAPES = [(16, 70, 2), (50, 33, 16)]
MORE = [(37, 45, 1), (33, 7, 3), (41, 50, 5), (20, 31, 8), (37, 45, 9), (17, 30, 33), (19, 21, 64)]


@pytest.mark.parametrize(("num", "columns", "dim"), SHAPES + MORE)
def test_sums_equal_the_double_loop(num, columns, dim, kernel):
    case = arguments(num, columns, dim)
    some = (num, columns, dim) in MORE
    found = jitted(functools.partial(sums, some=some))(*as_floats(*case))
    truths = references(*case)
    for name, value in found.items():
        assert relative(value, truths[name]) < 2e-6, name


@pytest.mark.parametrize("dim", [2, 16])
def test_far_from_the_origin(dim, kernel):
    """A cloud of spread 0.01 around 1: what centring leaves of float32, as on the plain path."""
    case = arguments(30, 26, dim, centre=1.0, spread=0.01)
    found = jitted(functools.partial(sums, some=True))(*as_floats(*case))
    for name, value in found.items():
        assert relative(value, references(*case)[name]) < 2e-5, name


@pytest.mark.parametrize("dim", [2, 12])
def test_terms_and_diagnostics(dim, kernel):
    x, s = ref.cloud(35, dim), ref.cloud(35, dim, seed=5)
    x, s = (np.asarray(a, np.float32).astype(float) for a in (x, s))
    h = 1.5 * dim
    rbf, imq = (px.kernels.RBF(bandwidth=h), px.kernels.IMQ(bandwidth=h))
    coupling = px.diffusions.FixedScale(gamma=0.3, lam=h)
    terms = {
        "stein": (px.Stein(kernel=imq), ref.stein(x, s, h, ref.imq)),
        "blob": (px.diffusions.Blob(kernel=rbf), ref.blob(x, h)),
        "gfsd": (px.diffusions.GFSD(kernel=rbf), ref.gfsd(x, h)),
        "transport": (px.diffusions.Transport(coupling=coupling), ref.transport(x, x, h, 0.3)),
    }

    def drifts(x, s):
        cloud = px.terms.Cloud(x, s, jnp.int32(0), px.terms.Frame(), x)
        return {k: term(cloud, None, term.init(x))[0].drift for k, (term, _) in terms.items()}

    points, scores = as_floats(x, s)
    for name, found in jitted(drifts)(points, scores).items():
        assert relative(found, terms[name][1]) < 3e-6, name
    if dim > 2:
        return
    np.testing.assert_allclose(px.diagnostics.ksd(points, scores), ref.ksd(x, s), rtol=1e-5)
    y = ref.cloud(21, dim, seed=7)
    found = px.diagnostics.mmd2(points, as_floats(y)[0], rbf)
    assert abs(found - ref.mmd2(x, y, h)) < 1e-6


def test_sinkhorn(kernel):
    x = ref.cloud(24, 2)
    coupling = px.diffusions.Sinkhorn(lam=2.0, iterations=500, tolerance=1e-6)
    term = px.diffusions.Transport(coupling=coupling)
    (points,) = as_floats(x)
    cloud = px.terms.Cloud(points, points, jnp.int32(0), px.terms.Frame(), points)
    found = jitted(lambda cloud: term(cloud, None, term.init(cloud.x))[0].drift)(cloud)
    assert relative(found, ref.sinkhorn_force(x, x, 2.0, "fixed")) < 1e-4


# ----------------------------------------------------------------------------------------------------------- medians


def clouds(num, dim):
    rng = np.random.default_rng(num)
    x = rng.normal(size=(num, dim))
    yield "normal", x
    yield "ties", np.round(x)
    yield "equal", np.ones((num, dim))
    yield "scales", x * 10.0 ** rng.integers(-2, 3, size=(num, 1))
    yield (
        "clumps",
        x * np.where(np.arange(num) % 5 > 0, 0.1, 1.0)[:, None],
    )  # where the guess misses


@pytest.mark.parametrize(("num", "dim"), [(2, 2), (50, 3)])
def test_median(num, dim, kernel):
    both = lambda x: (
        medians.median_sqdist(x),
        medians.median_sqdist(x, itself=True, of_squares=True),
    )
    function = jitted(both)
    for name, cloud in clouds(num, dim):
        (points,) = as_floats(cloud)
        x = np.asarray(points, float)
        distinct, every = function(points)
        np.testing.assert_allclose(distinct, ref.median_sqdist(x), rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(every, np.median(ref.sqdist(x, x)), rtol=1e-5, err_msg=name)


def test_the_two_middle_entries_are_exact(kernel):
    """Coordinates so coarse that no distance is rounded: every rank to the bit."""
    x = np.random.default_rng(0).integers(-8, 9, (21, 3)) / 4
    entries = np.sort(ref.sqdist(x, x).ravel())
    function = jitted(radix.middle)
    for rank in (1, 20, 21, 22, 200, 300, 440):
        found = function(*as_floats(x), rank)
        assert [float(a) for a in found] == [entries[rank - 1], entries[rank]], rank


def test_counts_of_the_largest_cloud_stay_exact():
    blocks = math.ceil(46340 / radix.BLOCK)
    pairs, programs = radix._grid(blocks)
    in_one = 2 * radix.BLOCK**2 * math.ceil((blocks + 1) / programs)
    assert in_one < 2**16  # a field of 16 bits
    assert pairs * programs * 255 < 2**24  # a float, for what is below 256
    assert radix.BLOCK < 2**8
    assert radix.COLS < 2**4


# ------------------------------------------------------------------------------------------ derivatives, batches, GPU


def test_derivatives_and_batches(kernel, monkeypatch):
    x, y, v, *_, h = as_floats(*arguments(19, 23, 2))

    def energy(x, h):
        force = pairwise.interact(x, y, lambda r2: kernels.RBF().pair(r2, h), values=v)
        return jnp.sum(force**2) + jnp.sum(pairwise.logsumexp(x, x, lambda r2: -r2 / h))

    def batch(x, h):
        return jax.vmap(energy)(jnp.stack([x, 2 * x]), jnp.stack([h, 3 * h]))

    slopes = jax.value_and_grad(energy, argnums=(0, 1))
    found = jitted(slopes)(x, h), jitted(batch)(x, h)
    monkeypatch.setattr(gpu, "MODE", None)
    truth = jitted(slopes)(x, h), jitted(batch)(x, h)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_medians_in_batches(kernel):
    """A median is constant for derivatives, as on the plain path."""
    (x,) = as_floats(ref.cloud(20, 2))
    both = jax.value_and_grad(medians.median_sqdist)
    values, slopes = jitted(jax.vmap(both))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(values[1], 4 * values[0], rtol=1e-6)
    assert not np.any(slopes)


def test_what_the_kernels_do_not_take_goes_the_plain_way(kernel, monkeypatch):
    def broken(*_):
        raise AssertionError("the kernel ran")

    x, y, *_ = as_floats(*arguments(9, 11, 2))
    monkeypatch.setattr(fused, "_launch", broken)
    table = jnp.arange(9.0)
    for weights in (
        jax.scipy.special.erf,  # no instruction of Triton
        lambda r2: r2 * jnp.mean(table * table),  # traced from an array that it closes over
        lambda r2: jnp.cumsum(r2, 1),  # not elementwise
    ):
        assert pairwise.total(x, y, weights).shape == (9,)
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64)
        assert pairwise.total(wide, wide, lambda r2: r2).dtype == jnp.float64
    with pytest.raises(AssertionError, match="the kernel ran"):
        pairwise.total(x, y, lambda r2: r2)


def test_a_kernel_and_its_slope_are_one_tile():
    """So the Stein direction sums one product for every coordinate, and not two."""
    h = jnp.float32(0.7)
    for pair, shared in ((px.kernels.RBF(), True), (px.kernels.IMQ(), False)):
        traced = formula.trace(lambda r2, kind=pair: kind.pair(r2, h), 1)
        value, slope = formula.evaluate(traced, [jnp.ones((2, 3))])
        assert (value.tile is slope.tile) == shared
        expected = pair.pair(jnp.ones((2, 3)), h)
        np.testing.assert_allclose(value.array(), expected[0], rtol=1e-6)
        np.testing.assert_allclose(slope.array(), expected[1], rtol=1e-6)


FORMULAS = {
    "tile + 1": lambda r: r + 1.0,
    "1 + tile": lambda r: 1.0 + r,
    "tile - 1": lambda r: r - 1,
    "1 - tile": lambda r: 1 - r,
    "tile + array": lambda r: r + jnp.float32(0.5),
    "2 tile + 1": lambda r: 2 * r + 1,
    "tile / 3 + 1": lambda r: r / 3 + 1,
    "exp + 1": lambda r: jnp.exp(-r) + 1,
    "log1p + 2": lambda r: jnp.log1p(r) + 2,
    "tile + exp + 1": lambda r: r + jnp.exp(-r) + 1,
    "2 tile + 3 exp - 1": lambda r: 2 * r + 3 * jnp.exp(-r) - 1,
    "tile + tile": lambda r: r + r,
    "tile - 3 tile": lambda r: r - 3 * r,
    "relu": lambda r: jax.nn.relu(r - 1),
    "sign": lambda r: jnp.sign(r - 1) * r,
    "sigmoid + softplus": lambda r: jax.nn.sigmoid(r) + jax.nn.softplus(r),
    "where": lambda r: jnp.where(r < 1.5, r + 1, 2 * r - 1),
    "rational": lambda r: (2 * r) ** 3 / (r + 1) ** 2,
    "power": lambda r: (r + 1) ** -0.5 + jnp.sqrt(r + 2),
    "matern": lambda r: (jnp.sqrt(3 * r + 1e-6) + 1) * jnp.exp(-jnp.sqrt(3 * r + 1e-6)),
    "constants": lambda r: (jnp.float32(2) + jnp.float32(3)) * r - (jnp.float32(2) - 1),
    "negated": lambda r: -(r + 1) + 4,
    "clipped": lambda r: jnp.clip(r - 1, -0.5, 0.5) + 1,
    "cosine": lambda r: jnp.cos(r) + 1,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_compute_what_their_functions_do(name):
    """The kernel and its twin share a formula, so comparing these two would not show a wrong one."""
    tile = jnp.asarray(np.random.default_rng(0).uniform(0, 4, (3, 5)), jnp.float32)
    traced = formula.trace(FORMULAS[name], 1)
    assert traced is not None
    found = formula.function(traced)(tile)
    np.testing.assert_allclose(found, FORMULAS[name](tile), rtol=2e-6, atol=1e-6)


class Matern(kernels.Kernel):
    """A user's own kernel, which adds a constant to a function of the distance."""

    bandwidth: kernels.Bandwidth = kernels.Fixed(2.0)

    def profile(self, a):
        s = jnp.sqrt(3 * a + 1e-6)
        return (s + 1) * jnp.exp(-s)


def test_a_kernel_of_the_users_own(kernel):
    x, _, score, *_ = arguments(17, 17, 2)
    points, scores = as_floats(x, score)
    cloud = Cloud(points, scores, jnp.int32(0), Frame(), points)
    found = jitted(lambda: px.Stein(kernel=Matern())(cloud, None, ())[0].drift)()
    s = np.sqrt(3 * ref.sqdist(x, x) / 2 + 1e-6)
    value, slope = (s + 1) * np.exp(-s), 1.5 * np.exp(-s)  # -(2 / h) k'(a), k' = -3/2 exp(-s)
    apart = x[:, None] - x[None]
    truth = (value @ score + (2 / 2 * slope[..., None] * apart).sum(1)) / len(x)
    assert relative(found, truth) < 3e-6


def test_float32_where_float64_is_allowed(kernel, x64):
    """Kernels are traced for 32 bits whatever the rest of the program does."""
    for dim in (2, 9):
        case = arguments(17, 22, dim)
        found = jitted(functools.partial(sums, some=True))(*as_floats(*case))["rbf"]
        assert found.dtype == jnp.float32
        assert relative(found, references(*case)["rbf"]) < 2e-6


@pytest.mark.parametrize(("dim", "wide"), [(2, True), (8, False), (16, True), (64, False)])
def test_kernels_lower_for_a_gpu(dim, wide, monkeypatch):
    """Triton's own errors show here, without a GPU."""
    monkeypatch.setattr(gpu, "possible", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = [(3000, dim), (2000, dim), (2000, dim), (3000,), (2000,), ()]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def everything(x, *others):
        return sums(x, *others), medians.median_sqdist(x)

    with absent.named(), jax.enable_x64(wide):
        program = jitted(everything).trace(*args).lower(lowering_platforms=("cuda",))
        with jax.default_matmul_precision("BF16_BF16_F32"):
            other = jitted(everything).trace(*args).lower(lowering_platforms=("cuda",))
    assert program.as_text().count("triton") >= 5
    # What a kernel's products round to is not a matter of settings.
    assert other.as_text() == program.as_text()


PASSES = {  # kernels over all pairs that a velocity takes: densities come before the forces that need them
    **{f"Stein, {name}": (1, lambda name=name: px.Stein(kernel=getattr(kernels, name)())) for name in ("RBF", "IMQ", "Laplace", "Mixture")},
    **{f"Blob, {name}": (2, lambda name=name: Blob(kernel=getattr(kernels, name)())) for name in ("RBF", "IMQ", "Laplace", "Mixture")},
    "Blob, calibrated": (2, lambda: Blob(calibrate=True)),
    "GFSD": (2, GFSD),
    "Transport": (1, Transport),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_every_term_has_its_kernels_on_a_gpu(name, monkeypatch):
    """None falls back to strips of the matrix of pairs without a word."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    passes, make = PASSES[name]
    term, x = make(), jax.ShapeDtypeStruct((5000, 2), jnp.float32)
    velocity = lambda x: term(Cloud(x, -x, jnp.int32(0), Frame(), x), None, term.init(x))[0].drift
    with absent.named():
        program = jax.jit(velocity).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count('name = "_direct_body"') == passes
