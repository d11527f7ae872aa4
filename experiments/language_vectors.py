"""Vectors of words from the text itself, for networks to start from: words that stand beside the same words get similar ones.

The paper's baseline starts from word2vec; what word2vec finds is close to a factorisation of how much more often two words stand
together than chance would have it (Levy & Goldberg 2014), and that is computed here, from the training text alone.
"""

from typing import Any

import numpy as np
from scipy import sparse

WINDOW = 5
"""Words to each side that count as beside; one that is d words away counts 1/d."""
SMOOTHING = 0.75
"""Power of the frequencies that chance has: rare words seem less special so."""
LEAST = 0.7
"""Counts below this are left out: most of them chance, and nine tenths of the work."""
EXTRA, ROUNDS = 40, 4
"""Of the randomised factorisation: columns beyond those wanted, and passes."""


def counts(ids: np.ndarray, words: int) -> Any:
    """How often two words stand beside each other in a text, a sparse symmetric matrix."""
    total = sparse.csr_matrix((words, words), dtype=np.float32)
    for apart in range(1, min(WINDOW, len(ids) - 1) + 1):
        code, times = np.unique(
            ids[:-apart].astype(np.int64) * words + ids[apart:], return_counts=True
        )
        entries = (times.astype(np.float32) / apart, (code // words, code % words))
        total = total + sparse.csr_matrix(entries, shape=(words, words))
    both = (total + total.T).tocsr()
    both.data[both.data < LEAST] = 0
    both.eliminate_zeros()
    return both


def positive_information(together: Any) -> Any:
    """max(0, log p(a, b) / (p(a) q(b))) for each pair of words, q the smoothed frequency."""
    often = np.asarray(together.sum(1)).ravel()
    smooth = often**SMOOTHING
    chance = np.maximum(often, 1e-30), np.maximum(smooth / max(smooth.sum(), 1e-30), 1e-30)
    entries = together.tocoo()
    excess = np.log(entries.data / (chance[0][entries.row] * chance[1][entries.col]))
    kept = excess > 0
    places = (entries.row[kept], entries.col[kept])
    return sparse.csr_matrix((excess[kept].astype(np.float32), places), shape=entries.shape)


def vectors(ids: np.ndarray, words: int, size: int) -> np.ndarray:
    """Vectors [words, size] with the root mean square 1: the leading singular vectors, times the roots of their values.

    Where there are fewer words than dimensions, the other dimensions are 0.
    """
    matrix = positive_information(counts(ids, words))
    rank = min(size, words)
    basis = np.random.default_rng(0).standard_normal((words, min(rank + EXTRA, words)), np.float32)
    for _ in range(ROUNDS):
        basis = np.linalg.qr(matrix.T @ np.linalg.qr(matrix @ basis)[0])[0]
    left, values, _ = np.linalg.svd(matrix @ basis, full_matrices=False)
    found = np.zeros((words, size), np.float32)
    found[:, :rank] = left[:, :rank] * np.sqrt(values[:rank])
    return found / np.float32(max(np.sqrt(np.mean(found**2)), 1e-30))
