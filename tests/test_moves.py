"""Trajectories and hops against slow NumPy versions, exactness in law, and what is never moved to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import particlax as px
from particlax.moves import (
    ACCEPTANCE,
    CAREFUL,
    JITTER,
    SNAPSHOTS,
    Density,
    Mixture,
    Tuning,
    Walkers,
    _trajectory,
    hop,
    window,
)

from . import references as ref

COMPILE_FAST = True

SMALLEST = 1e-6
"""P-values below this are beyond 5 standard errors."""


def bell(x):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))


def skew(x):
    """Independent log-gammas of shape 2: x = log g."""
    return jnp.sum(2 * x - jnp.exp(x))


def quartic(x):
    return -jnp.sum(x**4) / 4 - x[0] * x[1]


def quartic_slow(x):
    other = np.zeros_like(x)
    other[:2] = x[1::-1]
    return -np.sum(x**4) / 4 - x[0] * x[1], -(x**3) - other


def density_of(function, dim, dtype=None):
    return Density.of(px.Target(function), jnp.zeros(dim, dtype))


def walkers_at(density, x, step):
    x = jnp.asarray(x)
    value, score = density.score(x)
    return Walkers(x, value, score, jnp.full(len(x), jnp.log(step), x.dtype))


def tuning(factor, *, length=2.0, most=64, gain=0.0, shared=True):
    factor = jnp.asarray(factor)
    number = lambda value: jnp.asarray(value, factor.dtype)
    return Tuning(factor, number(length), jnp.int32(most), number(gain), jnp.asarray(shared))


def move(density, walkers, rule, *, seed=0, thin=1):
    return window(density, jax.random.key(seed), walkers, rule, jnp.int32(thin))


def ks(values, law):
    return stats.kstest(np.asarray(values, float), law).pvalue


# ------------------------------------------------------------------------------------------- leapfrog, slowly


class Slow:
    """The window in z = L^-1 x, one particle and one step at a time, with the numbers drawn by JAX."""

    def __init__(self, log_density, x, step, rule):
        self.log_density, self.x = log_density, np.array(x, float)
        self.log_step = np.full(len(x), np.log(step))
        self.rule, self.L = rule, np.asarray(rule.factor)
        self.careful, self.count, self.rates = 0, 0, []

    def leapfrog(self, x, p, eps, steps):
        z, s = np.linalg.solve(self.L, x), self.L.T @ self.log_density(x)[1]
        for _ in range(steps):
            p = p + eps / 2 * s
            z = z + eps * p
            s = self.L.T @ self.log_density(self.L @ z)[1]
            p = p + eps / 2 * s
        return self.L @ z, p

    def energy(self, x, p):
        return -self.log_density(x)[0] + p @ p / 2

    def trajectory(self, now):
        num = len(self.x)
        for_share, now = jax.random.split(now)
        share = float(jax.random.uniform(for_share, (), minval=0.5, maxval=1.5))
        wanted = np.ceil(share * float(self.rule.length) / np.exp(np.mean(self.log_step)))
        steps = int(np.clip(wanted, 1, int(self.rule.most)))
        for_step, for_momentum, for_test = jax.random.split(now, 3)
        jitter = np.asarray(jax.random.uniform(for_step, (num + 1, 1), minval=JITTER))[:, 0]
        momenta = np.asarray(jax.random.normal(for_momentum, self.x.shape))
        threshold = np.asarray(jax.random.uniform(for_test, (num,)))
        careful = jitter[-1] < JITTER + (1 - JITTER) * CAREFUL
        rates = np.zeros(num)
        for i in range(num):
            eps = np.exp(self.log_step[i]) * jitter[i] * (CAREFUL if careful else 1)
            y, p = self.leapfrog(self.x[i], momenta[i], eps, steps)
            gain = self.energy(self.x[i], momenta[i]) - self.energy(y, p)
            rates[i] = min(1, np.exp(gain))
            if threshold[i] < rates[i]:
                self.x[i] = y
        if not careful:
            signal = rates.mean() if bool(self.rule.shared) else rates
            self.log_step = self.log_step + float(self.rule.gain) * (signal - ACCEPTANCE)
        self.careful, self.count = self.careful + careful, self.count + steps
        self.rates.append(rates)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("thin", [1, 2])
def test_window_equals_the_slow_one(x64, thin, shared):
    x, L = ref.cloud(5, 3), np.linalg.cholesky(np.cov(ref.cloud(40, 3).T))
    density, rule = density_of(quartic, 3), tuning(L, most=9, gain=0.3, shared=shared)
    slow, key, clouds = Slow(quartic_slow, x, 0.5, rule), jax.random.key(3), []
    for now in jax.random.split(key, SNAPSHOTS):
        for i in range(thin):
            slow.trajectory(jax.random.fold_in(now, i))
        clouds.append(slow.x.copy())
    rates, total = np.array(slow.rates), SNAPSHOTS * thin
    assert 0 < slow.careful < total / 2
    assert (rates < 0.5).any()  # some were refused
    last, trace = window(density, key, walkers_at(density, x, 0.5), rule, jnp.int32(thin))
    np.testing.assert_allclose(trace.x, clouds, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(last.x, slow.x, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(last.log_step, slow.log_step, rtol=1e-9)
    np.testing.assert_allclose(trace.acceptance, rates.mean(0), rtol=1e-9)
    assert int(trace.evaluations) == slow.count
    for i in range(5):  # what is known of the density belongs to where the particle is
        value, score = quartic_slow(np.asarray(last.x)[i])
        np.testing.assert_allclose(last.log_density[i], value, rtol=1e-9)
        np.testing.assert_allclose(last.score[i], score, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(trace.log_density[-1], last.log_density)
    np.testing.assert_array_equal(trace.score[-1], last.score)
    assert {leaf.dtype for leaf in [*last, trace.x, trace.acceptance]} == {np.dtype(np.float64)}


def test_energy_error_is_of_second_order(x64):
    """Half the step, twice as many of them: the error falls to a quarter."""
    density, x, rule = density_of(skew, 3), 0.5 * ref.cloud(40, 3), tuning(0.7 * np.eye(3))
    go = jax.jit(
        lambda walkers, steps: _trajectory(density, jax.random.key(1), walkers, rule, steps)
    )
    logs = [
        np.log(go(walkers_at(density, x, 0.8 / steps), jnp.int32(steps))[1]) for steps in (16, 32)
    ]
    lost = (logs[0] < -1e-9) & (logs[1] < -1e-9)
    assert lost.sum() > 10
    np.testing.assert_allclose(np.median(logs[0][lost] / logs[1][lost]), 4, rtol=0.05)


def test_a_trajectory_goes_back_along_itself(x64):
    """x -> y with p means y -> x with the negative of the momentum at y: seen in the slow version, which
    equals the window, and by its Jacobian determinant of 1."""
    L = np.linalg.cholesky(np.cov(ref.cloud(40, 2).T))
    slow = Slow(quartic_slow, np.zeros((1, 2)), 1.0, tuning(L))
    x, p = np.array([0.3, -0.7]), np.array([1.1, 0.4])
    y, q = slow.leapfrog(x, p, 0.4, 7)
    back, r = slow.leapfrog(y, -q, 0.4, 7)
    np.testing.assert_allclose([back, r], [x, -p], atol=1e-10)
    flow = lambda v: np.concatenate(slow.leapfrog(v[:2], v[2:], 0.4, 7))
    start, tiny = np.concatenate([x, p]), 1e-5 * np.eye(4)
    jacobian = np.stack([(flow(start + e) - flow(start - e)) / 2e-5 for e in tiny])
    np.testing.assert_allclose(abs(np.linalg.det(jacobian)), 1, rtol=1e-5)


# -------------------------------------------------------------------------------------------- exact in law


def test_exact_draws_of_a_skewed_law_stay_exact_with_a_crude_step():
    num, rng = 4000, np.random.default_rng(0)
    density = density_of(skew, 2)
    x = np.log(rng.gamma(2.0, size=(num, 2))).astype(np.float32)
    factor = np.array([[1.0, 0.0], [0.5, 0.7]], np.float32)
    last, trace = move(density, walkers_at(density, x, 1.5), tuning(factor, length=4.0))
    assert 0.2 < trace.acceptance.mean() < 0.75  # crude, so the test matters
    for d in range(2):
        assert ks(np.exp(np.asarray(last.x, float)[:, d]), stats.gamma(2).cdf) > SMALLEST
    g = rng.gamma(2.0, size=(100_000, 2))
    exact = np.sum(2 * np.log(g) - g, 1)
    error = exact.std() * np.sqrt(1 / num + 1 / len(exact))
    assert abs(np.asarray(last.log_density).mean() - exact.mean()) < 5 * error


MEANS, WEIGHTS, SDS = (-4.0, 1.0), (0.7, 0.3), (1.0, 0.5)


def pair(x):
    """A mixture of two Gaussians in the first coordinate, N(0, 1) in the others."""
    means, weights, sds = (jnp.array(v, x.dtype) for v in (MEANS, WEIGHTS, SDS))
    parts = jnp.log(weights / sds) - 0.5 * ((x[0] - means) / sds) ** 2
    return jax.nn.logsumexp(parts) - 0.5 * jnp.sum(x[1:] ** 2)


def pair_cdf(x):
    return sum(w * stats.norm.cdf(x, m, s) for w, m, s in zip(WEIGHTS, MEANS, SDS, strict=True))


def pair_draws(num, weights=WEIGHTS, dim=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, dim))
    part = rng.choice(2, size=num, p=weights)
    x[:, 0] = np.take(MEANS, part) + np.take(SDS, part) * x[:, 0]
    return x.astype(np.float32)


def test_exact_draws_of_a_mixture_stay_exact():
    density = density_of(pair, 2)
    start = walkers_at(density, pair_draws(4000), 1.2)
    last, trace = move(density, start, tuning(np.diag([2.0, 1.5]).astype(np.float32)), thin=2)
    assert trace.acceptance.mean() < 0.8
    assert ks(last.x[:, 0], pair_cdf) > SMALLEST
    assert ks(last.x[:, 1], stats.norm.cdf) > SMALLEST


def test_trajectories_go_to_the_target_from_elsewhere():
    density = density_of(skew, 2)
    start = walkers_at(density, np.full((4000, 2), 3.0, np.float32), 0.5)
    last, _ = move(density, start, tuning(np.eye(2, dtype=np.float32)), thin=2)
    assert ks(np.exp(np.asarray(last.x, float)[:, 0]), stats.gamma(2).cdf) > SMALLEST


def mixture_of(weights, centres, sds, dim=2):
    centre = np.zeros((len(weights), dim))
    centre[:, 0] = centres
    factor = np.stack([sd * np.eye(dim) for sd in sds])
    logs = [np.log(w) if w else -np.inf for w in weights]
    return Mixture(*(jnp.asarray(a, jnp.float32) for a in (logs, centre, factor)))


BAD = mixture_of([0.5, 0.2, 0.3], [-3.0, 2.0, 6.0], [1.8, 1.0, 2.0])
GOOD = mixture_of([0.5, 0.5, 0.0], [*MEANS, 0.0], [1.2, 0.7, 1.0])
"""The last part is unused, as those with which `modes.fit` pads."""


def test_hops_keep_exact_draws_exact_with_a_badly_fitted_mixture():
    density = density_of(pair, 2)
    start = walkers_at(density, pair_draws(4000), 1.0)
    last, rate = hop(density, jax.random.key(5), start, BAD, 8)
    assert 0.1 < rate < 0.6
    assert np.mean(np.any(np.asarray(last.x != start.x), 1)) > 0.5
    assert ks(last.x[:, 0], pair_cdf) > SMALLEST
    assert ks(last.x[:, 1], stats.norm.cdf) > SMALLEST


def test_hops_repair_the_shares_of_modes():
    num, density = 4000, density_of(pair, 2)
    start = walkers_at(density, pair_draws(num, weights=[0.1, 0.9]), 1.0)
    last = start
    for seed in range(4):
        last, rate = hop(density, jax.random.key(seed), last, GOOD, 8)
    share = np.mean(np.asarray(last.x[:, 0]) < -1)
    assert abs(share - 0.7) < 5 * np.sqrt(0.7 * 0.3 / num)
    assert 0.2 < rate < 1
    assert ks(last.x[:, 0], pair_cdf) > SMALLEST
    np.testing.assert_array_equal(last.log_step, start.log_step)


def test_hop_equals_the_slow_one(x64):
    """One proposal: y of the mixture, accepted with min(1, p(y) q(x) / p(x) q(y))."""
    num, key = 50, jax.random.key(2)
    centres, density = np.array([[-4.0, 0.0], [2.0, 1.0]]), density_of(pair, 2)
    factors = np.array([[[1.5, 0.0], [0.3, 0.8]], [[0.6, 0.0], [-1.0, 1.2]]])
    weights, x = np.array([0.4, 0.6]), pair_draws(num).astype(float)
    mixture = Mixture(jnp.log(weights), jnp.asarray(centres), jnp.asarray(factors))
    last, rate = hop(density, key, walkers_at(density, x, 1.0), mixture, 1)
    for_part, for_noise, for_test = jax.random.split(jax.random.fold_in(key, 0), 3)
    part = np.asarray(jax.random.categorical(for_part, jnp.log(weights), shape=(num,)))
    noise = np.asarray(jax.random.normal(for_noise, (num, 2)))
    threshold = np.asarray(jax.random.uniform(for_test, (num,)))
    q = lambda v: sum(
        w * stats.multivariate_normal(c, f @ f.T).pdf(v)
        for w, c, f in zip(weights, centres, factors, strict=True)
    )
    p = lambda v: stats.norm.pdf(v[1]) * np.dot(WEIGHTS, stats.norm.pdf(v[0], MEANS, SDS))
    rates, expected = [], x.copy()
    for i in range(num):
        y = centres[part[i]] + factors[part[i]] @ noise[i]
        rates.append(min(1, p(y) * q(x[i]) / (p(x[i]) * q(y))))
        if threshold[i] < rates[i]:
            expected[i] = y
    assert 0.1 < np.mean(expected != x) < 0.9
    np.testing.assert_allclose(rate, np.mean(rates), rtol=1e-9)
    np.testing.assert_allclose(last.x, expected, rtol=1e-9, atol=1e-12)
    assert {leaf.dtype for leaf in [*last, rate]} == {np.dtype(np.float64)}


# ---------------------------------------------------------------------------------- nowhere is never gone to


def walled(x):
    """N(0, I) with +inf, NaN and -inf around it, and a place of finite values with slopes of NaN."""
    root = jnp.where(x[1] < -1.5, 0.0, jnp.sqrt(x[1] + 1.5))
    walls = [x[0] > 0.5, x[0] < -1.5, x[1] > 0.5]
    return jnp.select(walls, [jnp.inf, jnp.nan, -jnp.inf], bell(x) + 0.0 * root)


def box(x):
    """The law of each coordinate."""
    low, high = stats.norm.cdf(-1.5), stats.norm.cdf(0.5)
    return (stats.norm.cdf(x) - low) / (high - low)


def box_draws(num):
    x = np.random.default_rng(0).normal(size=(20 * num, 2))
    return x[np.all((x > -1.5) & (x < 0.5), 1)][:num].astype(np.float32)


def test_the_walls_are_what_they_should_be():
    density = density_of(walled, 2)
    points = jnp.array([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -2.0], [-1.0, 0.25]])
    value, score = density.score(points)
    np.testing.assert_allclose(value, [np.inf, np.nan, -np.inf, -2.0, -0.53125])
    assert np.isnan(score[3]).any()
    np.testing.assert_allclose(score[4], [1.0, -0.25])


def test_nowhere_is_never_gone_to():
    """Not to +inf, NaN or -inf, nor to slopes of NaN; and the law between the walls stays exact."""
    density = density_of(walled, 2)
    start = walkers_at(density, box_draws(3000), 0.5)
    last, trace = move(density, start, tuning(np.eye(2, dtype=np.float32)))
    far, rate = hop(density, jax.random.key(1), last, mixture_of([1.0], [0.0], [1.5]), 4)
    assert 0.1 < trace.acceptance.mean() < 0.8
    assert 0.05 < rate < 0.6
    for walkers in (last, far):
        assert -1.5 <= walkers.x.min() < walkers.x.max() <= 0.5
        assert all(np.isfinite(leaf).all() for leaf in walkers)
        for d in range(2):
            assert ks(walkers.x[:, d], box) > SMALLEST
    assert np.isfinite(trace.x).all() and np.isfinite(trace.log_density).all()
    assert np.mean(np.asarray(far.x != start.x)) > 0.9


def test_a_particle_without_a_finite_density_stays_nowhere():
    density = density_of(walled, 2)
    x = np.tile([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0], [0.0, -4.0]], (750, 1)).astype(np.float32)
    nowhere = jnp.full(3000, -jnp.inf)
    start = Walkers(jnp.asarray(x), nowhere, jnp.zeros((3000, 2)), nowhere)
    last, trace = move(density, start, tuning(np.eye(2, dtype=np.float32), most=1))
    np.testing.assert_array_equal(last.log_density, nowhere)
    assert not trace.moved.any()
    assert not trace.acceptance.any()


def test_a_particle_that_is_nowhere_takes_any_place():
    density = density_of(bell, 2)
    x, nowhere = jnp.full((5, 2), 30.0), jnp.full(5, -jnp.inf)
    start = Walkers(x, nowhere, jnp.zeros_like(x), nowhere)  # a step of zero: evaluated in place
    last, _ = move(density, start, tuning(np.eye(2, dtype=np.float32), length=np.inf, most=1))
    np.testing.assert_array_equal(last.x, x)
    np.testing.assert_allclose(last.log_density, -900.0)
    np.testing.assert_allclose(last.score, -30.0)


# ----------------------------------------------------------------------------------------- steps and counts


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("first", [1e-3, 30.0])
def test_steps_are_tuned_to_the_acceptance_rate(first, shared):
    """Whole steps to 0.8; the careful fifth of the trajectories is nearly always accepted."""
    density = density_of(bell, 20)
    x = np.random.default_rng(0).normal(size=(200, 20)).astype(np.float32)
    walkers, one = walkers_at(density, x, first), np.eye(20, dtype=np.float32)
    for seed, gain in enumerate([1.0] * 4 + [0.3] * 2):
        rule = tuning(one, gain=gain, shared=shared, most=8)
        walkers, _ = move(density, walkers, rule, seed=seed)
    if shared:
        assert np.ptp(np.asarray(walkers.log_step)) == 0
    _, trace = move(density, walkers, tuning(one, most=8), seed=99, thin=8)
    expected = CAREFUL * 1.0 + (1 - CAREFUL) * ACCEPTANCE
    np.testing.assert_allclose(trace.acceptance.mean(), expected, atol=0.05)


def test_a_gain_of_zero_freezes_the_step():
    density = density_of(bell, 2)
    start = walkers_at(density, ref.cloud(5, 2).astype(np.float32), 5.0)
    last, _ = move(density, start, tuning(np.eye(2, dtype=np.float32)))
    np.testing.assert_array_equal(last.log_step, start.log_step)


def test_careful_trajectories_come_through_where_whole_ones_do_not():
    """With steps beyond 3, where 2 is the limit of stability, only the careful ones, a fifth of all, are accepted."""
    density = density_of(bell, 20)
    x = np.random.default_rng(0).normal(size=(200, 20)).astype(np.float32)
    rule = tuning(np.eye(20, dtype=np.float32), length=1e3, most=8)
    _, trace = move(density, walkers_at(density, x, 3.0 / JITTER), rule, thin=8)
    error = np.sqrt(CAREFUL * (1 - CAREFUL) / (SNAPSHOTS * 8))
    assert 0.5 * CAREFUL - 5 * error < trace.acceptance.mean() < CAREFUL + 5 * error
    assert trace.moved.all()


def test_evaluations_are_those_that_happen():
    seen = []

    def counted(x):
        jax.debug.callback(lambda _: seen.append(1), x[0])
        return bell(x)

    density, num = density_of(counted, 2), 3
    start = walkers_at(density, ref.cloud(num, 2).astype(np.float32), 0.3)
    jax.effects_barrier()
    seen.clear()
    _, trace = move(density, start, tuning(np.eye(2, dtype=np.float32)), thin=2)
    jax.effects_barrier()
    assert len(seen) == num * int(trace.evaluations)
    seen.clear()
    hop(density, jax.random.key(0), start, GOOD, 5)
    jax.effects_barrier()
    assert len(seen) == num * 5


def test_at_most_so_many_steps():
    density = density_of(bell, 2)
    start = walkers_at(density, ref.cloud(5, 2).astype(np.float32), 1e-4)
    _, trace = move(density, start, tuning(np.eye(2, dtype=np.float32), most=5), thin=3)
    assert int(trace.evaluations) == SNAPSHOTS * 3 * 5


# ---------------------------------------------------------------------------------------- dtypes and pytrees


@pytest.mark.parametrize("dim", [3, 12])
def test_a_density_of_a_pytree(x64, dim):
    """Flat vectors are taken apart in the order of JAX, leading axes stay, scores come back flat."""
    x = ref.cloud(4, dim)
    tree = jax.tree.map(jnp.asarray, ref.layout(x, "tree"))
    weigh = lambda t: sum((i + 1) * jnp.sum(jnp.sin(t[k])) for i, k in enumerate(sorted(t)))
    density = Density.of(px.Target(weigh), jax.tree.map(lambda leaf: leaf[0], tree))
    back = density.unflatten(jnp.asarray(x))
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert jax.tree.map(jnp.shape, density.unflatten(x[None])) == jax.tree.map(
        lambda leaf: (1, *leaf.shape), tree
    )
    weights = np.concatenate(
        [
            np.full(cols.stop - cols.start, i + 1.0)
            for i, (cols, _) in enumerate(ref.LEAVES[dim].values())
        ]
    )
    value, score = density.score(jnp.asarray(x))
    np.testing.assert_allclose(value, np.sin(x) @ weights, rtol=1e-10)
    np.testing.assert_allclose(score, weights * np.cos(x), rtol=1e-10)


def test_leaves_keep_their_dtypes():
    point = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros((), jnp.float32)}
    density = Density.of(px.Target(bell), point)
    back = density.unflatten(jnp.zeros((4, 3)))
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), back) == {
        "a": (jnp.bfloat16, (4, 2)),
        "b": (jnp.float32, (4,)),
    }


def test_equal_densities_are_one():
    one, two = density_of(bell, 2), density_of(bell, 2)
    assert one == two
    assert hash(one) == hash(two)
    assert one != density_of(bell, 3)
    assert one != density_of(skew, 2)
