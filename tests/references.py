"""Slow, obvious NumPy float64 references, written from the formulas; they never call particlax.

Clouds are M x D matrices here; `layout` gives them the shape in which a test feeds them to the library.
"""

import itertools

import numpy as np

LEAVES = {
    3: {"a": (slice(0, 1), ()), "w": (slice(1, 3), (2,))},
    12: {
        "a": (slice(0, 1), ()),
        "b": (slice(1, 7), (2, 3)),
        "c": (slice(7, 8), ()),
        "d": (slice(8, 12), (4,)),
    },
}
"""Leaves of the dict clouds by dimension: columns and shape of one particle, in the order of JAX."""


def cloud(num, dim, seed=0, spread=1.0, centre=0.0):
    """A skewed cloud: nothing in it is symmetric, so that signs and factors show."""
    rng = np.random.default_rng([seed, num, dim])
    return centre + spread * (rng.normal(size=(num, dim)) + 0.3 * rng.exponential(size=(num, 1)))


def layout(matrix, kind):
    """The matrix itself for "array", a dict of several leaves (some scalar) for "tree"."""
    if kind == "array":
        return matrix
    leaves = LEAVES[matrix.shape[1]]
    return {k: matrix[:, cols].reshape(len(matrix), *tail) for k, (cols, tail) in leaves.items()}


def matrix_of(tree):
    """The M x D float64 matrix of a layout."""
    leaves = [tree[k] for k in sorted(tree)] if isinstance(tree, dict) else [tree]
    return np.concatenate([np.asarray(v, np.float64).reshape(len(v), -1) for v in leaves], 1)


# ------------------------------------------------------------------------------------ distances, kernels


def sqdist(x, y):
    r2 = np.zeros((len(x), len(y)))
    for i in range(len(x)):
        for j in range(len(y)):
            for d in range(x.shape[1]):
                r2[i, j] += (x[i, d] - y[j, d]) ** 2
    return r2


def rbf(a):
    return np.exp(-a), -np.exp(-a)


def imq(a, power=0.5):
    return (1 + a) ** -power, -power * (1 + a) ** (-power - 1)


def laplace(a):
    value = np.exp(1 - np.sqrt(1 + a))
    return value, -value / (2 * np.sqrt(1 + a))


def mixture(a, scales=(0.1, 1.0, 10.0), base=rbf):
    pairs = [base(a / c) for c in scales]
    value = sum(v for v, _ in pairs) / len(scales)
    return value, sum(s / c for (_, s), c in zip(pairs, scales, strict=True)) / len(scales)


def kernel_matrix(x, h, profile=rbf):
    """K_ij = k(r2_ij / h)."""
    return profile(sqdist(x, x) / h)[0]


def kernel_gradient(xi, xj, h, profile=rbf):
    """The gradient of k(|xi - xj|^2 / h) with respect to xj."""
    a = np.sum((xi - xj) ** 2) / h
    return profile(a)[1] * 2 * (xj - xi) / h


# -------------------------------------------------------------------------------------------- bandwidths


def median_sqdist(x):
    """med^2: the squared median distance over distinct pairs."""
    distances = []
    for i in range(len(x)):
        for j in range(i):
            distances.append(np.sqrt(np.sum((x[i] - x[j]) ** 2)))
    return np.median(distances) ** 2


def median_bandwidth(x):
    """The paper's med^2 / log M."""
    return median_sqdist(x) / np.log(len(x))


def reference_median_bandwidth(x):
    """Liu and Wang's SVGD code: the median of the full matrix of squares, / log(M + 1)."""
    return np.median(sqdist(x, x)) / np.log(len(x) + 1)


def heat_cost(x, h):
    """h^2 sum_k lambda(x_k)^2 / q(x_k) with q = sum_j exp(-|x - x_j|^2 / h)."""
    num, dim = x.shape
    K = kernel_matrix(x, h)
    grad_log_q = np.zeros((num, dim))
    for j in range(num):
        for k in range(num):
            grad_log_q[j] += -2 / h * K[j, k] * (x[j] - x[k])
        grad_log_q[j] /= K[j].sum()
    cost = 0.0
    for k in range(num):
        laplacian = transport = 0.0
        for j in range(num):
            diff = x[k] - x[j]
            laplacian += K[k, j] * (4 / h**2 * (diff @ diff) - 2 * dim / h)
            transport += (2 / h * K[k, j] * diff) @ grad_log_q[j]
        cost += (laplacian + transport) ** 2 / K[k].sum()
    return h**2 * cost


# ------------------------------------------------------------------------------------------------- terms


def stein(x, score, h, profile=rbf):
    """phi_i = 1/M sum_j [K_ij s_j + grad_{x_j} K_ij]."""
    K, phi = kernel_matrix(x, h, profile), np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x)):
            phi[i] += K[i, j] * score[j] + kernel_gradient(x[i], x[j], h, profile)
    return phi / len(x)


def blob_energy(x, h, profile=rbf):
    """sum_i log(sum_j K_ij)."""
    return np.sum(np.log(np.sum(kernel_matrix(x, h, profile), 1)))


def blob(x, h, profile=rbf):
    """sum_j (1/S_i + 1/S_j) grad_{x_j} K_ij; RBF: sum_j (2/h) K_ij (1/S_i + 1/S_j)(x_i - x_j)."""
    S, force = kernel_matrix(x, h, profile).sum(1), np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x)):
            force[i] += (1 / S[i] + 1 / S[j]) * kernel_gradient(x[i], x[j], h, profile)
    return force


def gfsd(x, h, profile=rbf):
    """-grad log of the smoothed density; RBF: (2/h)(x_i - sum_j K_ij x_j / S_i)."""
    S, force = kernel_matrix(x, h, profile).sum(1), np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x)):
            force[i] += kernel_gradient(x[i], x[j], h, profile) / S[i]
    return force


def transport(x, y, lam, gamma):
    """gamma sum_j 2 (1 - r2/lam) exp(-r2/lam) (x_i - y_j)."""
    force = np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(y)):
            a = np.sum((x[i] - y[j]) ** 2) / lam
            force[i] += 2 * gamma * (1 - a) * np.exp(-a) * (x[i] - y[j])
    return force


def sinkhorn(x, y, lam, sweeps=20000):
    """u, v with P = diag(u) exp(-r2/lam) diag(v) of marginals 1/M: alternate scaling, to the end."""
    num = len(x)
    K = np.exp(-sqdist(x, y) / lam)
    u, v = np.ones(num), np.ones(num)
    for _ in range(sweeps):
        u = 1 / num / (K @ v)
        v = 1 / num / (K.T @ u)
        if np.abs(u * (K @ v) * num - 1).max() < 1e-15:
            break
    return u, v


def plan(x, y, lam):
    u, v = sinkhorn(x, y, lam)
    return u[:, None] * np.exp(-sqdist(x, y) / lam) * v[None, :]


def sinkhorn_force(x, y, lam, derivative):
    """2 M P (1 - r2/lam)(x_i - y_j) with u, v held; -2 M P (x_i - y_j) by the envelope theorem."""
    P, r2, num = plan(x, y, lam), sqdist(x, y), len(x)
    force = np.zeros_like(x)
    for i in range(num):
        for j in range(num):
            weight = 2 * num * P[i, j]
            weight *= (1 - r2[i, j] / lam) if derivative == "fixed" else -1
            force[i] += weight * (x[i] - y[j])
    return force


def entropic_cost(x, y, lam):
    """min over couplings P with marginals 1/M of <P, r2> + lam sum_ij P_ij log P_ij."""
    P = plan(x, y, lam)
    return np.sum(P * sqdist(x, y)) + lam * np.sum(P * np.log(P))


def calibrated(force, x):
    """C^-1 (t_i - mean t) with C = 1/M sum_i t_i (x_i - m)^T."""
    num, dim = x.shape
    m, t_mean, C = x.mean(0), force.mean(0), np.zeros((dim, dim))
    for i in range(num):
        C += np.outer(force[i] - t_mean, x[i] - m) / num
    inverse = np.linalg.inv(C)
    return np.stack([inverse @ (force[i] - t_mean) for i in range(num)])


def matched(force, x, width=4.0, ridge=1e-4, jitter=1e-6):
    """t + g by solving for all of g = b + A z + R u at once, in whitened coordinates; R R^T = K + jitter I."""
    num, dim = x.shape
    root = np.linalg.cholesky(np.cov(x.T, bias=True).reshape(dim, dim))
    z, t = (x - x.mean(0)) @ np.linalg.inv(root).T, force @ root
    r2 = sqdist(z, z)
    h = width * np.median(np.sqrt(r2[np.triu_indices(num, 1)])) ** 2
    K = np.exp(-r2 / h)
    R = np.linalg.cholesky(K + jitter * np.eye(num))
    divergence = np.zeros((num, dim))  # of each kernel function, mean over the particles
    for j in range(num):
        for i in range(num):
            divergence[j] += -2 / h * (z[i] - z[j]) * K[i, j] / num
    F = np.concatenate([np.ones((num, 1)), z, R], 1)
    penalty = np.diag([0.0] * (1 + dim) + [ridge / num] * num)
    c = np.concatenate([np.zeros((1, dim)), np.eye(dim), np.linalg.solve(R, divergence)])
    # minimise mean |t + F theta|^2 - 2 mean div(F theta) + penalty: a force is minus a score
    theta = np.linalg.solve(F.T @ F / num + penalty, c - F.T @ t / num)
    return (t + F @ theta) @ np.linalg.inv(root)


def gradient(function, x, step=1e-5):
    """Central finite differences of a function of the whole cloud."""
    grad = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        grad[index] = (function(up) - function(down)) / (2 * step)
    return grad


# ------------------------------------------------------------------------------------------- diagnostics


def ksd(x, score):
    """Root of the mean over all pairs of the Stein kernel of (1 + r2)^(-1/2)."""
    num, dim = x.shape
    total = 0.0
    for i in range(num):
        for j in range(num):
            diff = x[i] - x[j]
            base = 1 + diff @ diff
            value = base**-0.5
            grad_i, grad_j = -(base**-1.5) * diff, base**-1.5 * diff
            trace = dim * base**-1.5 - 3 * (diff @ diff) * base**-2.5
            total += score[i] @ score[j] * value + score[i] @ grad_j + score[j] @ grad_i + trace
    return np.sqrt(total) / num


def mmd2(x, y, h, profile=rbf):
    xx, yy, xy = (np.mean(profile(sqdist(a, b) / h)[0]) for a, b in ((x, x), (y, y), (x, y)))
    return xx + yy - 2 * xy


def wasserstein2(x, y):
    """The best of all permutations; for a handful of points."""
    r2 = sqdist(x, y)
    costs = [
        np.mean([r2[i, p[i]] for i in range(len(x))]) for p in itertools.permutations(range(len(x)))
    ]
    return np.sqrt(min(costs))


def sliced_wasserstein2(x, y, units):
    """Equal sizes: root mean square over directions of the distance of sorted projections."""
    squares = []
    for unit in units:
        squares.append(np.mean((np.sort(x @ unit) - np.sort(y @ unit)) ** 2))
    return np.sqrt(np.mean(squares))


def stein_residuals(x, score):
    """mean s times the cloud's sd, and 1/M sum_i s_i (x_i - m)^T + I."""
    num, dim = x.shape
    m, matrix = x.mean(0), np.eye(dim)
    for i in range(num):
        matrix += np.outer(score[i], x[i] - m) / num
    return score.mean(0) * x.std(0), matrix


# ------------------------------------------------------------------------------------------------- the zoo


def waves(z):
    w1 = np.sin(2 * np.pi * z[:, 0] / 4)
    w2 = 3 * np.exp(-0.5 * ((z[:, 0] - 1) / 0.6) ** 2)
    w3 = 3 / (1 + np.exp(-(z[:, 0] - 1) / 0.3))
    return w1, w2, w3


def rezende(name, z):
    """U1..U4 of table 1 of Rezende & Mohamed (2015); the density is exp(-U)."""
    w1, w2, w3 = waves(z)
    bump = lambda d, sd: np.exp(-0.5 * (d / sd) ** 2)
    if name == "U1":
        ring = 0.5 * ((np.sqrt(np.sum(z**2, 1)) - 2) / 0.4) ** 2
        return ring - np.log(bump(z[:, 0] - 2, 0.6) + bump(z[:, 0] + 2, 0.6))
    if name == "U2":
        return 0.5 * ((z[:, 1] - w1) / 0.4) ** 2
    if name == "U3":
        return -np.log(bump(z[:, 1] - w1, 0.35) + bump(z[:, 1] - w1 + w2, 0.35))
    return -np.log(bump(z[:, 1] - w1, 0.4) + bump(z[:, 1] - w1 + w3, 0.35))
