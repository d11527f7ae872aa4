"""Modes of a cloud: trees, barriers and fits against slow versions, and clouds whose modes are known."""

import numpy as np
import pytest
from scipy import stats

from particlax import modes

from . import references as ref

# ------------------------------------------------------------------------------------------- slow references


def prim(x):
    """Grow a tree from particle 0, always by the shortest way out."""
    r2, inside, pairs = ref.sqdist(x, x), [0], []
    while len(inside) < len(x):
        best = (np.inf, 0, 0)
        for i in inside:
            for j in range(len(x)):
                if j not in inside and r2[i, j] < best[0]:
                    best = (r2[i, j], i, j)
        inside.append(best[2])
        pairs.append(sorted(best[1:]))
    return sorted(pairs)


def flood(num, pairs):
    """The lowest particle that each one can be reached from."""
    label = list(range(num))
    for _ in range(num):
        for i, j in pairs:
            label[i] = label[j] = min(label[i], label[j])
    return label


def partition(labels):
    """Labels up to their names."""
    return {tuple(np.flatnonzero(np.asarray(labels) == one)) for one in np.unique(labels)}


def shrunk(cov, num):
    """(1 - w) cov + w diag(cov) with w = D / (D + 2 num)."""
    out, dim = np.array(cov), len(cov)
    weight = dim / (dim + 2 * num)
    for i in range(dim):
        for j in range(dim):
            out[i, j] *= 1 if i == j else 1 - weight
    return out


def pooled(x, labels):
    total, dim = np.zeros((x.shape[2],) * 2), x.shape[2]
    for label in np.unique(labels):
        own = [
            x[n, m] for n in range(x.shape[0]) for m in range(x.shape[1]) if labels[n, m] == label
        ]
        centre = sum(own) / len(own)
        for point in own:
            for i in range(dim):
                for j in range(dim):
                    total[i, j] += (point - centre)[i] * (point - centre)[j]
    return total / labels.size


# ------------------------------------------------------------------------------------------ tree and barriers


@pytest.mark.parametrize(("num", "dim"), [(2, 1), (17, 1), (23, 2), (20, 12)])
def test_neighbours_are_those_of_prim(num, dim):
    x = ref.cloud(num, dim)
    assert modes.neighbours(x).tolist() == prim(x)


def test_neighbours_of_equal_points_are_a_whole_tree():
    x = np.repeat(ref.cloud(4, 2), 3, axis=0)
    pairs = modes.neighbours(x)
    assert len(pairs) == 11
    assert len(set(flood(12, pairs))) == 1
    assert np.isclose(np.sum(ref.sqdist(x, x)[tuple(pairs.T)] > 0), 3)


def along(log_density, x, pairs):
    ways = [(1 - t) * x[pairs[:, 0]] + t * x[pairs[:, 1]] for t in modes.STOPS]
    return np.array([[log_density(point) for point in way] for way in ways])


def dips_of(log_density, x, root, pairs=None):
    z = np.linalg.solve(root, x.T).T
    pairs = modes.neighbours(z) if pairs is None else pairs
    ends = np.array([log_density(point) for point in x])
    return pairs, modes.barriers(z, pairs, ends, along(log_density, x, pairs))


def labels_of(log_density, x):
    """As the sampler does it: the metric of the whole cloud, the tree, the dips, the parts."""
    root = modes.factor(np.cov(x.T, bias=True).reshape(x.shape[1], -1), len(x))
    pairs, dips = dips_of(log_density, x, root)
    return modes.components(len(x), pairs, dips)


@pytest.mark.parametrize("dim", [1, 2, 12])
def test_a_gaussian_in_its_own_metric_has_no_barriers(dim):
    rng = np.random.default_rng(dim)
    root = np.tril(rng.normal(size=(dim, dim))) + 3 * np.eye(dim)
    x = rng.normal(size=(30, dim)) @ root.T * 0.7  # so that no way is longer than 2 D
    log_density = lambda v: -0.5 * np.sum(np.linalg.solve(root, v) ** 2)
    pairs, dips = dips_of(log_density, x, root)
    z = np.linalg.solve(root, x.T).T
    assert np.all(np.sum((z[pairs[:, 0]] - z[pairs[:, 1]]) ** 2, 1) < 2 * dim)
    np.testing.assert_allclose(dips, 0, atol=1e-10)


def test_barriers_of_long_ways_count_up_to_their_mean_length():
    """A way of r^2 = 100 in D = 1 counts as 2: the Gaussian lies 100/8 above the chord, 2/8 are expected."""
    z, pairs = np.array([[-5.0], [5.0]]), np.array([[0, 1]])
    _, dips = dips_of(lambda v: -0.5 * v @ v, z, np.eye(1), pairs)
    expected = max(0.5 * t * (1 - t) * (2 - 100) for t in modes.STOPS)
    np.testing.assert_allclose(dips, expected)


def test_barriers_by_hand():
    """The dip of a double well, log p = -(x^2 - 1)^2 * h, between its ends -1 and 1, is h at 0."""
    z, pairs = np.array([[-1.0], [1.0]]), np.array([[0, 1]])
    _, dips = dips_of(lambda v: -7.0 * (v[0] ** 2 - 1) ** 2, z, np.eye(1), pairs)
    np.testing.assert_allclose(dips, 7 + 2 / 8)


@pytest.mark.parametrize("where", [-np.inf, np.nan])
def test_a_way_through_nowhere_is_a_barrier(where):
    """`Ensemble.evaluate` gives -inf where the log density is not finite."""
    z, pairs = np.array([[-1.0], [1.0]]), np.array([[0, 1]])
    between = np.array([[0.0], [-np.inf if np.isnan(where) else where], [0.0]])
    dips = modes.barriers(z, pairs, np.zeros(2), between)
    assert modes.components(2, pairs, dips).tolist() == [0, 1]


def test_components_are_what_the_flood_reaches():
    x = ref.cloud(25, 2)
    pairs = modes.neighbours(x)
    dips = np.random.default_rng(0).exponential(modes.BARRIER, size=24)
    found = modes.components(25, pairs, dips)
    expected = flood(25, pairs[dips <= modes.BARRIER])
    assert partition(found) == partition(expected)
    assert sorted(np.unique(found)) == list(range(found.max() + 1))


# --------------------------------------------------------------------------------------------- known clouds


@pytest.mark.parametrize("dim", [1, 2, 10, 50])
@pytest.mark.parametrize("num", [40, 128])
def test_a_gaussian_is_one_mode(num, dim):
    x = np.random.default_rng(num + dim).normal(size=(num, dim)) * np.geomspace(1e-3, 1e3, dim)
    sd = np.geomspace(1e-3, 1e3, dim)
    assert labels_of(lambda v: -0.5 * np.sum((v / sd) ** 2), x).max() == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_banana_is_one_mode(seed):
    z = np.random.default_rng(seed).normal(size=(128, 2))
    x = np.stack([2 * z[:, 0], 4 * z[:, 0] ** 2 + 0.5 * z[:, 1]], 1)
    log_density = lambda v: -0.5 * (v[0] / 2) ** 2 - 0.5 * ((v[1] - v[0] ** 2) / 0.5) ** 2
    big = partition(labels_of(log_density, x))
    assert max(map(len, big)) >= 120  # a lonely particle at a tip may be by itself


@pytest.mark.parametrize("law", [stats.laplace, stats.logistic, stats.t(3)])
def test_heavier_tails_are_one_mode(law):
    x = law.rvs(size=(128, 2), random_state=0)
    parts = partition(labels_of(lambda v: np.sum(law.logpdf(v)), x))
    assert max(map(len, parts)) >= 125


@pytest.mark.parametrize("dim", [1, 2, 10])
@pytest.mark.parametrize("gap", [12.0, 1e3])
def test_two_far_gaussians_are_two_modes(gap, dim):
    rng, first = np.random.default_rng(0), np.arange(128) < 90
    x = rng.normal(size=(128, dim))
    x[first, 0] += gap
    near = lambda v: -0.5 * np.sum(v**2)
    shift = gap * np.eye(dim)[0]
    found = labels_of(lambda v: np.logaddexp(near(v) - 1.0, near(v - shift)), x)
    parts = partition(found)
    assert not any({True, False} <= set(first[list(part)]) for part in parts)
    # In the metric of the whole cloud the gap is short, so that a lonely particle may be cut off with it.
    for side in (first, ~first):
        assert max(side[list(part)].sum() for part in parts) > 0.6 * side.sum()


# --------------------------------------------------------------------------------------------------- crossed


def starts(labels, window):
    """The first cloud of every window."""
    return np.arange(len(labels)) % window == 0


def crossed_slow(labels, window):
    """Pairs of labels with more moves between them than 1 % of the visits to the rarer one."""
    num, joined = labels.max() + 1, []
    moves = np.zeros((num, num))
    for m in range(labels.shape[1]):
        for n in range(len(labels) - 1):
            if n % window != window - 1:  # between windows there are hops
                moves[labels[n, m], labels[n + 1, m]] += 1
    for i in range(num):
        for j in range(i):
            visits = max(min(moves[i].sum(), moves[j].sum()), 1)
            if moves[i, j] + moves[j, i] > modes.CROSSING * visits:
                joined.append((i, j))
    return np.asarray(flood(num, joined))[labels]


@pytest.mark.parametrize("seed", range(6))
def test_crossed_equals_the_loop(seed):
    """Chains that rarely change side by themselves, and often between windows."""
    rng, window = np.random.default_rng(seed), 8
    labels = np.zeros((6 * window, 15), int)
    for n in range(len(labels)):
        last = labels[n - 1] if n else rng.integers(4, size=15)
        change = rng.random(15) < (0.5 if n % window == 0 else 0.004)
        labels[n] = np.where(change, rng.integers(4, size=15), last)
    assert partition(modes.crossed(labels, starts(labels, window)).ravel()) == partition(
        crossed_slow(labels, window).ravel()
    )


def test_hops_between_windows_are_not_crossings():
    labels = np.tile(np.repeat([[0], [1], [0], [1]], 4, axis=0), (1, 5))
    assert modes.crossed(labels, starts(labels, 4)).max() == 1
    assert modes.crossed(labels, starts(labels, 8)).max() == 0


# ------------------------------------------------------------------------------------------ covariances, fits


def two_lumps(num=6, chains=20, dim=3):
    rng = np.random.default_rng(0)
    labels = (rng.random((num, chains)) < 0.3).astype(int)
    x = rng.normal(size=(num, chains, dim)) @ np.tril(rng.normal(size=(dim, dim)))
    return x + 30 * labels[..., None], labels


def test_covariance_is_pooled_over_modes():
    x, labels = two_lumps()
    np.testing.assert_allclose(modes.covariance(x, labels), pooled(x, labels), rtol=1e-10)


def test_covariance_of_one_mode_is_the_plain_one():
    x, labels = two_lumps()
    plain = np.cov(x.reshape(-1, 3).T, bias=True)
    np.testing.assert_allclose(modes.covariance(x, 0 * labels), plain, rtol=1e-10)


def test_whitened_solves_for_every_row():
    x, root = ref.cloud(7, 3), np.linalg.cholesky(np.cov(ref.cloud(30, 3).T))
    np.testing.assert_allclose(modes.whitened(x, root) @ root.T, x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num", [2, 10, 1e6])
def test_factor_of_the_shrunk_covariance(num):
    cov = np.cov(ref.cloud(50, 4).T * np.geomspace(1e-3, 1e3, 4)[:, None])
    root = modes.factor(cov, num)
    assert np.allclose(root, np.tril(root))
    np.testing.assert_allclose(root @ root.T, shrunk(cov, num), rtol=1e-6)


def test_factor_of_fewer_draws_than_dimensions():
    """Sample covariance of rank 19 in D = 60: whitened by the factor, the true one keeps a fair condition."""
    x = np.random.default_rng(0).normal(size=(20, 60))
    cov = np.cov(x.T, bias=True)
    assert np.linalg.matrix_rank(cov) == 19
    root = modes.factor(cov, 20)
    np.testing.assert_allclose(np.diag(root @ root.T), np.diag(cov), rtol=1e-6)
    assert np.linalg.cond(root) < 5


def test_factor_without_any_spread_or_correlations():
    root = modes.factor(np.diag([0.0, 4.0]), 100)
    assert np.isfinite(root).all()
    assert root[0, 0] > 0
    np.testing.assert_allclose(root[1], [0, 2.0], atol=1e-6)
    broken = modes.factor(np.array([[1.0, 2.0], [2.0, 1.0]]), 1e9)  # no covariance at all
    np.testing.assert_allclose(broken, np.eye(2))


def test_fit_by_hand():
    x, labels = two_lumps()
    found, dim = modes.fit(x, labels), 3
    for k in range(2):  # the larger mode first
        own = x[labels == k]
        weight = len(own) / 4
        own_cov = np.cov(own.T, bias=True)
        mixed = (weight * own_cov + (dim + 1) * pooled(x, labels)) / (weight + dim + 1)
        np.testing.assert_allclose(found.centre[k], own.mean(0), rtol=1e-10)
        np.testing.assert_allclose(
            found.factor[k] @ found.factor[k].T, shrunk(mixed, weight + dim + 1), rtol=1e-5
        )
        np.testing.assert_allclose(np.exp(found.log_weight[k]), len(own) / labels.size)
    assert found.log_weight.shape == (2,)


def test_three_modes_are_padded_to_four():
    x, labels = two_lumps()
    labels = labels.copy()
    labels[0, :] = 2
    found = modes.fit(x, labels)
    assert np.isfinite(found.log_weight).tolist() == [True, True, True, False]
    np.testing.assert_array_equal(found.factor[3], np.eye(3))
    assert found.labels(x).max() <= 2


def test_a_rare_mode_is_still_proposed():
    x, labels = two_lumps()
    labels = np.zeros_like(labels)
    labels[0, 0] = 1
    found = modes.fit(x, labels)
    np.testing.assert_allclose(np.exp(found.log_weight[1]), 0.1 / 2)
    assert np.linalg.cond(found.factor[1]) < 1e3  # one draw leans on the pooled covariance


def test_no_more_modes_than_the_most():
    x = ref.cloud(200, 2)[None]
    labels = (np.arange(200) // 5)[None]
    labels[0, :3] = 7  # the largest
    found = modes.fit(x, labels)
    assert len(found.log_weight) == modes.MOST == 32
    assert np.isfinite(found.log_weight).all()
    np.testing.assert_allclose(found.centre[0], x[labels == 7].mean(0))


def test_labels_are_those_of_the_most_probable_gaussian():
    x, labels = two_lumps()
    found = modes.fit(x, labels)
    laws = [
        stats.multivariate_normal(c, f @ f.T)
        for c, f in zip(found.centre[:2], found.factor[:2], strict=True)
    ]
    middle = np.random.default_rng(1).uniform(0, 30, size=(4, 50, 3))
    logs = np.stack(
        [w + law.logpdf(middle) for w, law in zip(found.log_weight[:2], laws, strict=True)]
    )
    np.testing.assert_array_equal(found.labels(middle), logs.argmax(0))
    np.testing.assert_array_equal(found.labels(x), labels)


def test_modes_that_are_empty_for_a_while_are_remembered():
    before = modes.fit(np.array([[[0.0], [0.2], [9.0], [9.1]]]), np.array([[0, 0, 1, 1]]))
    here = np.array([[[0.1], [0.3], [-0.1], [0.0]]])
    now = modes.fit(here, np.zeros((1, 4), int))
    found = modes.remembered(now, before, before.labels(here))
    assert np.isfinite(found.log_weight).sum() == 2
    assert sorted(np.round(found.centre[:2, 0])) == [0.0, 9.0]
    np.testing.assert_allclose(np.exp(found.log_weight[1]), 0.05)
    everywhere = np.array([[[0.1], [9.0]]])
    assert modes.remembered(now, before, before.labels(everywhere)) is now
