"""Kernels and bandwidth rules against NumPy double loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px
from particlax import pairwise
from particlax.errors import OptionError, ParticleError

from . import references as ref

K = px.kernels
KERNELS = {
    "RBF": (K.RBF, ref.rbf),
    "IMQ": (K.IMQ, ref.imq),
    "IMQ power 1.3": (functools.partial(K.IMQ, power=1.3), functools.partial(ref.imq, power=1.3)),
    "Laplace": (K.Laplace, ref.laplace),
    "Mixture": (K.Mixture, ref.mixture),
    "Mixture of IMQ": (
        functools.partial(K.Mixture, scales=(0.5, 2.0), base=K.IMQ()),
        functools.partial(ref.mixture, scales=(0.5, 2.0), base=ref.imq),
    ),
}
NUMBERS = [2, 3, 4, 5, 6, 7, 11, 20, 35, 58, 60]  # 1, 3, 6, 10, 15, 21, 55, ... pairs: odd and even


def as_jax(matrix, kind="array"):
    return jax.tree.map(jnp.asarray, ref.layout(matrix, kind))


def close(left, right, rtol=1e-10):
    np.testing.assert_allclose(left, right, rtol=rtol)


def test_every_kernel_is_tested():
    kernels = {
        name for name in K.__all__ if issubclass(getattr(K, name), K.Kernel) and name != "Kernel"
    }
    assert kernels == {name for name in KERNELS if " " not in name}


@pytest.mark.parametrize("name", KERNELS)
def test_profile_and_slope(x64, name):
    kernel, profile = KERNELS[name][0](), KERNELS[name][1]
    r2, h = np.array([0.0, 1e-8, 0.1, 1.0, 3.0, 20.0, 300.0]), 1.7
    value, weight = kernel.pair(jnp.asarray(r2), jnp.asarray(h))
    expected, slope = profile(r2 / h)
    close(value, expected)
    close(weight, -2 / h * slope)


@pytest.mark.parametrize("name", KERNELS)
def test_reference_slopes_are_derivatives(name):
    profile, a, step = KERNELS[name][1], np.array([0.1, 1.0, 3.0]), 1e-5
    numeric = (profile(a + step)[0] - profile(a - step)[0]) / (2 * step)
    close(profile(a)[1], numeric, rtol=1e-8)


@pytest.mark.parametrize("name", KERNELS)
def test_profile_is_one_at_zero_and_falls(name):
    profile = np.asarray(KERNELS[name][0]().profile(jnp.linspace(0.0, 30.0, 50)))
    close(profile[0], 1, rtol=1e-6)
    assert np.all(np.diff(profile) < 0)
    assert np.all(profile >= 0)


@pytest.mark.parametrize("name", KERNELS)
def test_weight_is_the_gradient_of_the_kernel(x64, name):
    """grad_{x_j} K_ij = W_ij (x_i - x_j), by automatic differentiation of the library's own K."""
    kernel, h = KERNELS[name][0](), jnp.asarray(0.8)
    x, y = jnp.array([0.3, -1.0]), jnp.array([1.1, 0.4])
    value = lambda y: kernel.pair(jnp.sum((x - y) ** 2), h)[0]
    weight = kernel.pair(jnp.sum((x - y) ** 2), h)[1]
    close(jax.grad(value)(y), weight * (x - y))


@pytest.mark.parametrize("dim", [3, 12])
@pytest.mark.parametrize("num", NUMBERS)
def test_median_rule(x64, num, dim):
    x = ref.cloud(num, dim)
    close(K.Median()(jnp.asarray(x)), ref.median_bandwidth(x))


@pytest.mark.parametrize("dim", [3, 12])
@pytest.mark.parametrize("num", NUMBERS)
def test_reference_median_rule(x64, num, dim):
    x = ref.cloud(num, dim)
    # Two particles: four entries, two of them zero, so the median is half the squared distance.
    close(K.ReferenceMedian()(jnp.asarray(x)), ref.reference_median_bandwidth(x))


@pytest.mark.parametrize("rule", ["Median", "ReferenceMedian"])
@pytest.mark.parametrize("dim", [3, 12])
def test_median_rules_on_trees_with_scale(x64, rule, dim):
    x = ref.cloud(15, dim)
    expected = {"Median": ref.median_bandwidth, "ReferenceMedian": ref.reference_median_bandwidth}
    close(getattr(K, rule)(scale=2.5)(as_jax(x, "tree")), 2.5 * expected[rule](x))


def fast_sqdist(x):
    return np.sum((x[:, None] - x[None, :]) ** 2, -1)


def fast_median(x):
    r2 = fast_sqdist(x)
    return np.median(np.sqrt(r2[np.triu_indices(len(x), 1)])) ** 2


@pytest.mark.parametrize("num", [513, 700, 1100])
def test_large_clouds_use_a_fixed_random_subsample(x64, num):
    x = ref.cloud(num, 3) * np.linspace(1, 2, num)[:, None]  # the order of particles matters
    rows = np.sort(np.random.default_rng(0).permutation(num)[:512])
    assert len(set(rows)) == 512
    close(K.Median()(jnp.asarray(x)), fast_median(x[rows]) / np.log(num))
    expected = np.median(fast_sqdist(x[rows])) / np.log(num + 1)
    close(K.ReferenceMedian()(jnp.asarray(x)), expected)


def test_512_particles_are_not_subsampled(x64):
    x = ref.cloud(512, 2)
    close(K.Median()(jnp.asarray(x)), fast_median(x) / np.log(512))


@pytest.mark.parametrize("dim", [2, 12])
def test_exact_median_in_strips(x64, dim):
    num = 1100
    assert num * num > pairwise.STRIP_ELEMENTS["cpu"]
    x = ref.cloud(num, dim)
    close(K.Median(subsample=None)(jnp.asarray(x)), fast_median(x) / np.log(num))


def test_exact_reference_median_in_strips(x64):
    x = ref.cloud(1100, 2)
    rule = K.ReferenceMedian(subsample=None)
    close(rule(jnp.asarray(x)), np.median(fast_sqdist(x)) / np.log(1101))


def test_subsample_of_a_chosen_size(x64):
    x = ref.cloud(50, 3)
    rows = np.sort(np.random.default_rng(0).permutation(50)[:20])
    close(K.Median(subsample=20)(jnp.asarray(x)), fast_median(x[rows]) / np.log(50))


def heat_cost(x, h):
    x = jnp.asarray(x)
    return K.HeatEquation().cost(x, pairwise.sqdist(x, x), jnp.asarray(h))


@pytest.mark.parametrize("dim", [3, 12])
@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_heat_equation_cost(x64, factor, dim):
    x = ref.cloud(9, dim)
    h = factor * ref.median_bandwidth(x)
    np.testing.assert_allclose(heat_cost(x, h), ref.heat_cost(x, h), rtol=1e-9)


def test_heat_equation_cost_is_dimensionless(x64):
    x = ref.cloud(9, 3)
    close(heat_cost(5 * x, 25.0), heat_cost(x, 1.0))


@pytest.mark.parametrize(("dim", "kind"), [(2, "array"), (3, "array"), (3, "tree")])
def test_heat_equation_rule_takes_the_best_candidate(x64, dim, kind):
    x = ref.cloud(15, dim)  # 105 pairs
    rule = K.HeatEquation(candidates=9, spread=32.0)
    widths = ref.median_bandwidth(x) * np.geomspace(1 / 32, 32, 9)
    costs = [ref.heat_cost(x, h) for h in widths]
    best = int(np.argmin(costs))
    assert 0 < best < 8
    close(rule(as_jax(x, kind)), widths[best])


def test_heat_equation_rule_of_large_clouds_uses_a_fixed_random_subsample(x64):
    x = ref.cloud(40, 2) * np.linspace(1, 2, 40)[:, None]
    rows = np.sort(np.random.default_rng(0).permutation(40)[:15])
    rule, whole = K.HeatEquation(subsample=15), K.HeatEquation(subsample=None)
    close(rule(jnp.asarray(x)), whole(jnp.asarray(x[rows])))


@pytest.mark.parametrize("dim", [1, 2])
def test_heat_equation_spreads_a_gaussian_like_heat(x64, dim):
    """What the rule is for: -grad log q of a standard normal cloud should resemble x."""
    x = np.asarray(jax.random.normal(jax.random.key(1), (200, dim)))
    h = float(K.HeatEquation()(jnp.asarray(x)))
    slope = np.sum(ref.gfsd(x, h) * x) / np.sum(x * x)
    assert 0.55 < slope < 1.2


@pytest.mark.parametrize("kernel", [K.RBF, K.IMQ, K.Laplace, K.Mixture])
def test_a_number_is_a_fixed_bandwidth(kernel):
    h = kernel(bandwidth=0.25).bandwidth(jnp.zeros((3, 2)))
    assert float(h) == 0.25


@pytest.mark.parametrize("rule", [K.Fixed(0.5), K.Median(), K.ReferenceMedian()])
@pytest.mark.parametrize("shift", [64.0, 4096.0])
def test_the_bandwidth_does_not_depend_on_where_the_cloud_is(rule, shift):
    """The shifts are exact in float32 for these points, so all distances stay the same to the bit."""
    x = np.random.default_rng(2).integers(-64, 64, (11, 3)).astype(np.float32) / 64
    np.testing.assert_array_equal((x + np.float32(shift)) - np.float32(shift), x)
    choose = jax.jit(rule)
    near, far = choose(jnp.asarray(x)), choose(jnp.asarray(x + np.float32(shift)))
    np.testing.assert_allclose(far, near, rtol=1e-5)


@pytest.mark.parametrize("rule", [K.Median(), K.ReferenceMedian(), K.HeatEquation()])
def test_a_collapsed_cloud_keeps_a_positive_finite_bandwidth(rule):
    h = float(rule(jnp.ones((6, 2))))
    assert np.isfinite(h)
    assert h > 0


@pytest.mark.parametrize("rule", [K.Median(), K.ReferenceMedian(), K.HeatEquation()])
def test_a_zero_cloud_keeps_a_positive_finite_bandwidth(rule):
    h = float(rule(jnp.zeros((6, 2))))
    assert np.isfinite(h)
    assert h > 0


@pytest.mark.parametrize("rule", [K.Median(), K.ReferenceMedian(), K.HeatEquation()])
@pytest.mark.parametrize(("num", "words"), [(1, "1 particle"), (4, "equal")])
def test_rules_refuse_clouds_without_distances(rule, num, words):
    with pytest.raises(ParticleError, match=words):
        K.RBF(bandwidth=rule).check(jnp.ones((num, 2)))


@pytest.mark.parametrize("h", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_bandwidths_are_refused(h):
    with pytest.raises(OptionError):
        K.RBF(bandwidth=h)


def test_kernels_without_sense_are_refused():
    with pytest.raises(OptionError, match="scales"):
        K.Mixture(scales=())
    with pytest.raises(OptionError, match="power"):
        K.IMQ(power=0.0)
    with pytest.raises(OptionError, match="bandwidth"):
        K.RBF(bandwidth="median")
    with pytest.raises(OptionError, match="candidates"):
        K.HeatEquation(candidates=1)


class _Narrow(px.kernels.RBF):
    """Not in one ratio any more, although it is an RBF by name."""

    def profile(self, a):
        return jnp.exp(-(a**2))


def test_the_ratio_of_slope_and_kernel():
    r2, h = jnp.array([0.1, 1.0, 7.0]), jnp.array(1.7)
    value, slope = px.kernels.RBF().pair(r2, h)
    np.testing.assert_allclose(slope / value, np.full(3, px.kernels.RBF().ratio(h)), rtol=1e-6)
    for kernel in (px.kernels.IMQ(), px.kernels.Laplace(), _Narrow()):
        assert kernel.ratio(h) is None


# ------------------------------------------------------------------------------------- parts of one's own


def test_a_mixture_takes_its_base_as_it_is():
    """Its bandwidth, unless another is given, and a `pair` that was written for it."""

    class Twice(K.RBF):
        def pair(self, r2, h):
            value, slope = super().pair(r2, h)
            return 2 * value, 2 * slope

    wide = K.Mixture(scales=(1.0,), base=K.RBF(bandwidth=4.0))
    assert float(wide.bandwidth(jnp.zeros((3, 1)))) == 4.0
    assert (
        float(K.Mixture(bandwidth=3.0, base=K.RBF(bandwidth=4.0)).bandwidth(jnp.zeros((3, 1))))
        == 3.0
    )
    r2, h = jnp.linspace(0.0, 9.0, 7), jnp.float32(1.7)
    plain = K.Mixture(scales=(0.5, 2.0)).pair(r2, h)
    doubled = K.Mixture(scales=(0.5, 2.0), base=Twice()).pair(r2, h)
    for one, two in zip(plain, doubled, strict=True):
        np.testing.assert_allclose(two, 2 * one, rtol=1e-5)


def test_bandwidths_may_be_traced_or_plain_numbers():
    x = jnp.asarray(ref.cloud(6, 2), jnp.float32)
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))

    def moved(h):
        flow = px.svgd(target, kernel=K.RBF(bandwidth=h), step_size=0.1)
        return flow.step(jax.random.key(0), flow.init(x))[0].particles

    both = jax.vmap(moved)(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(both[1], moved(2.0), rtol=1e-5)
    slope = jax.grad(lambda h: moved(h).sum())(1.5)
    rise = (moved(1.51).sum() - moved(1.49).sum()) / 0.02
    np.testing.assert_allclose(slope, rise, rtol=0.05, atol=1e-3)

    class Two(K.Bandwidth):
        def choose(self, x):
            return 2.0

    np.testing.assert_allclose(moved(Two()), moved(2.0), rtol=1e-6)
