"""Which particles sit in one mode, and a Gaussian for each mode.

Neighbours in the cloud are joined by its minimum spanning tree; where the log density dips on the way between
two neighbours, they belong to different modes. Curved and long modes stay whole, since their neighbours are near.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

__all__ = [
    "Gaussians",
    "barriers",
    "components",
    "covariance",
    "crossed",
    "factor",
    "fit",
    "neighbours",
    "remembered",
]

MOST = 32
"""The largest number of modes."""
BARRIER = 5.0
"""How far the log density must dip between two neighbours for them to be in different modes."""
CROSSING = 0.01
"""Share of moves that change sides, beyond which there is nothing to cross."""
STOPS = (0.25, 0.5, 0.75)
"""Where the way between two neighbours is looked at."""


def neighbours(z: Float[np.ndarray, "M D"]) -> Int[np.ndarray, "E 2"]:
    """The M - 1 pairs of the minimum spanning tree of a whitened cloud.

    >>> neighbours(np.array([[0.0], [5.0], [1.0]])).tolist()
    [[0, 2], [1, 2]]
    """
    from scipy.sparse.csgraph import minimum_spanning_tree
    from scipy.spatial.distance import pdist, squareform

    gaps = squareform(pdist(z))
    # A distance of zero, or of less than 1e-8, would count as no way at all.
    tree = minimum_spanning_tree(gaps / max(gaps.max(), 1e-300) + 1e-6).tocoo()
    pairs = np.sort(np.stack([tree.row, tree.col], 1), 1)
    return pairs[np.lexsort(pairs.T[::-1])]


def barriers(
    z: Float[np.ndarray, "M D"],
    pairs: Int[np.ndarray, "E 2"],
    ends: Float[np.ndarray, " M"],
    between: Float[np.ndarray, "T E"],
) -> Float[np.ndarray, " E"]:
    """How far the log density dips on the way, below what a Gaussian would have there.

    `ends` are the log densities of the particles, `between` those at `STOPS` of the way. At the share t
    of a way of length r, a Gaussian lies t (1 - t) r^2 / 2 above the chord; r^2 counts up to 2 D, its
    mean, so that the sparse tails of heavier laws do not look like walls.
    """
    length = np.minimum(np.sum((z[pairs[:, 0]] - z[pairs[:, 1]]) ** 2, 1), 2 * z.shape[1])
    dips = [
        (1 - t) * ends[pairs[:, 0]] + t * ends[pairs[:, 1]] + 0.5 * t * (1 - t) * length - seen
        for t, seen in zip(STOPS, between, strict=True)
    ]
    return np.max(dips, 0)


def components(
    num: int, pairs: Int[np.ndarray, "E 2"], dips: Float[np.ndarray, " E"]
) -> Int[np.ndarray, " M"]:
    """A label for every particle: the tree's parts after cutting the ways that dip below `BARRIER`.

    >>> components(3, np.array([[0, 2], [1, 2]]), np.array([0.1, 30.0])).tolist()
    [0, 1, 0]
    """
    joined = np.zeros((num, num), bool)
    joined[tuple(pairs[dips <= BARRIER].T)] = True
    return _parts(joined)


def _parts(joined: np.ndarray) -> np.ndarray:
    from scipy.sparse.csgraph import connected_components

    return connected_components(joined, directed=False)[1].astype(int)


def whitened(x: Float[np.ndarray, "N D"], root: Float[np.ndarray, "D D"]) -> np.ndarray:
    """L^-1 x for every row x."""
    from scipy.linalg import solve_triangular

    return solve_triangular(root, x.T, lower=True).T


class Gaussians(NamedTuple):
    """One Gaussian for each mode, padded to a power of two: log weights (-inf: unused), centres, factors."""

    log_weight: Float[np.ndarray, " K"]
    centre: Float[np.ndarray, "K D"]
    factor: Float[np.ndarray, "K D D"]

    def labels(self, x: Float[np.ndarray, "N M D"]) -> Int[np.ndarray, "N M"]:
        """The Gaussian that most probably made each draw."""
        flat, dim = x.reshape(-1, x.shape[2]), x.shape[2]
        best, value = np.zeros(len(flat), int), np.full(len(flat), -np.inf)
        for k in np.flatnonzero(np.isfinite(self.log_weight)):
            z = whitened(flat - self.centre[k], self.factor[k])
            log_q = self.log_weight[k] - 0.5 * np.sum(z**2, 1)
            log_q -= np.sum(np.log(np.diag(self.factor[k]).reshape(dim)))
            best[log_q > value], value = k, np.maximum(value, log_q)
        return best.reshape(x.shape[:2])


def remembered(now: Gaussians, before: Gaussians, labels: Int[np.ndarray, "N M"]) -> Gaussians:
    """`now` and those of `before` that no label names: a mode that is empty for a while is still proposed, if seldom."""
    used = lambda found: np.flatnonzero(np.isfinite(found.log_weight))
    absent = np.setdiff1d(used(before), labels)[: MOST - len(used(now))]
    if not len(absent):
        return now
    total = len(used(now)) + len(absent)
    size, rest = 1 << (total - 1).bit_length(), len(used(now))
    join = lambda a, b: np.concatenate([a[used(now)], b[absent]])
    pad = lambda a, fill: np.concatenate([a, np.broadcast_to(fill, (size - total, *a.shape[1:]))])
    log_weight = join(now.log_weight, before.log_weight)
    log_weight[rest:] = np.log(0.1 / total)
    centre, factors = join(now.centre, before.centre), join(now.factor, before.factor)
    dim = centre.shape[1]
    return Gaussians(pad(log_weight, -np.inf), pad(centre, 0.0), pad(factors, np.eye(dim)))


def crossed(
    labels: Int[np.ndarray, "N M"], fresh: Bool[np.ndarray, " N"]
) -> Int[np.ndarray, "N M"]:
    """The labels with those made one between which chains go back and forth by themselves.

    Chains that cross need no help, so what they cross is no gap between modes. Moves into clouds that are
    `fresh` do not count: there were hops on the way.

    >>> labels = np.array([[0, 1, 2], [1, 0, 2], [0, 1, 2], [1, 1, 2]])
    >>> crossed(labels, np.array([True, False, False, False])).tolist()[0]
    [0, 0, 1]
    """
    num = int(labels.max()) + 1
    moves = np.zeros((num, num))
    own = ~fresh[1:]
    np.add.at(moves, (labels[:-1][own].ravel(), labels[1:][own].ravel()), 1)
    visits = np.maximum(moves.sum(1), 1)
    between = (moves + moves.T) / np.minimum(visits[:, None], visits[None, :])
    return _parts(between > CROSSING)[labels]


def covariance(
    x: Float[np.ndarray, "N M D"], labels: Int[np.ndarray, "N M"]
) -> Float[np.ndarray, "D D"]:
    """The covariance around the centre of each draw's own mode, pooled over modes."""
    total = np.zeros((x.shape[2],) * 2)
    for label in np.unique(labels):
        own = x[labels == label]
        own = own - own.mean(0)
        total += own.T @ own
    return total / labels.size


def factor(cov: Float[np.ndarray, "D D"], num: float | int) -> Float[np.ndarray, "D D"]:
    """A Cholesky factor of the covariance of `num` draws, its correlations shrunk towards none.

    The weight of the diagonal, D / (D + 2 num), is what keeps a factor from D > num draws usable.
    """
    dim = len(cov)
    sd = np.sqrt(np.maximum(np.diag(cov), np.finfo(float).tiny))
    weight = dim / (dim + 2.0 * num) + 1e-7
    correlation = (1 - weight) * (cov / np.outer(sd, sd)) + weight * np.eye(dim)
    try:
        return sd[:, None] * np.linalg.cholesky(correlation)
    except np.linalg.LinAlgError:  # rounding has eaten the correlations
        return np.diag(sd)


def fit(x: Float[np.ndarray, "N M D"], labels: Int[np.ndarray, "N M"]) -> Gaussians:
    """A Gaussian for each mode.

    A mode with few draws leans on the covariance pooled over all; none has a weight below a tenth of
    its fair share, so that a rare mode is still proposed.
    """
    dim, pooled = x.shape[2], covariance(x, labels)
    found, counts = np.unique(labels, return_counts=True)
    order = np.argsort(-counts)[:MOST]
    size = 1 << (len(order) - 1).bit_length()  # few sizes, few compilations
    log_weight = np.full(size, -np.inf)
    centre, factors = np.zeros((size, dim)), np.tile(np.eye(dim), (size, 1, 1))
    for k, which in enumerate(order):
        own = x[labels == found[which]]
        num = counts[which] / 4  # neighbours in time are alike
        spread = (own - own.mean(0)).T @ (own - own.mean(0)) / len(own)
        mixed = (num * spread + (dim + 1) * pooled) / (num + dim + 1)
        centre[k], factors[k] = own.mean(0), factor(mixed, num + dim + 1)
        log_weight[k] = np.log(max(counts[which] / labels.size, 0.1 / len(order)))
    return Gaussians(log_weight, centre, factors)
