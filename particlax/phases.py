"""The phases of `px.sample`: settle near the target, tune, then rounds of exact sampling.

An ensemble moves in windows of a few trajectories. Between windows Python looks: it takes the covariance
of the cloud as the metric of the next window, gives particles that are hopelessly behind the place of others,
and fits a Gaussian to every mode. Nothing changes within a round, so a round is an exact Markov chain
for each particle, independent of the others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from particlax import modes
from particlax.evidence import Chains, moments
from particlax.moves import SNAPSHOTS, Density, Mixture, Tuning, Walkers, hop, window

__all__ = ["Ensemble", "Round"]

LENGTH = 2.0
"""Mean length of a trajectory in whitened coordinates; a quarter turn of a Gaussian is pi / 2."""
MOST = 64
"""Most leapfrog steps of a trajectory."""
SHORT = 4
"""Leapfrog steps of a trajectory while settling, when energy must be lost, not kept."""
SETTLING = (10, 40)
"""Fewest and most windows of the first phase."""
PATIENCE = 5
"""Windows before particles that are behind lose their place."""
TUNING = 10
"""Windows of the second phase."""
HOPS = 4
"""Proposals between modes after each window, where there are several modes."""
KEPT = 512
"""Most clouds kept of one round."""
UNMIXED = 1.1
"""R-hat of a window beyond which modes are looked for."""
RUNAWAY = 1e15
"""Coordinates beyond this are on their way to infinity."""


class Round(NamedTuple):
    """One round of exact sampling."""

    chains: Chains
    shares: tuple[float, ...]
    """Shares of the draws in each mode."""
    length: int
    """Trajectories of each chain."""


class _Seen(NamedTuple):
    """A `Trace` on the host."""

    x: np.ndarray
    log_density: np.ndarray
    score: np.ndarray
    acceptance: np.ndarray
    moved: np.ndarray
    evaluations: np.ndarray


class _Kept:
    """The windows of a frozen round, one cloud in `thin`."""

    def __init__(self, thin: int):
        self.thin = thin
        self.traces: list[_Seen] = []

    def __len__(self) -> int:
        return sum(len(trace.x) for trace in self.traces)

    def halve(self) -> None:
        """Keep every other cloud."""
        self.thin *= 2
        self.traces = [
            trace._replace(
                x=trace.x[1::2], log_density=trace.log_density[1::2], score=trace.score[1::2]
            )
            for trace in self.traces
        ]

    def chains(self) -> Chains:
        join = lambda name: np.concatenate([getattr(t, name) for t in self.traces]).astype(float)
        moved = np.any([trace.moved for trace in self.traces], 0)
        return Chains(join("x"), join("log_density"), join("score"), moved)


class Ensemble:
    """Particles on their way to the target, and the budget they have left."""

    def __init__(self, density: Density, key: Array, x: Float[Array, "M D"], budget: int):
        self.density, self.key, self.budget, self.spent = density, key, budget, 0
        self.dtype = x.dtype
        self.place(x)
        self.factor = np.eye(x.shape[1])
        self.mixture: modes.Gaussians | None = None
        self.frozen = _Kept(1)
        self.cost = 1.0
        """Score evaluations of a trajectory, lately."""

    @property
    def left(self) -> int:
        """Score evaluations left to each particle."""
        return self.budget - self.spent

    @property
    def runaway(self) -> bool:
        """Whether some coordinate has gone to infinity."""
        return not bool(jnp.all(jnp.abs(self.walkers.x) < RUNAWAY))

    def evaluate(self) -> np.ndarray:
        """Which particles have a finite log density and score where they are."""
        num = len(self.walkers.x)
        self._window(length=np.inf, most=1, gain=0.0, shared=False)
        fine = np.isfinite(np.asarray(self.walkers.log_density))
        step = jnp.full(num, np.log(0.1), self.dtype)
        self.walkers = self.walkers._replace(log_step=step)
        return fine

    def place(self, x: Float[Array, "M D"]) -> None:
        """Put the particles at `x`, not yet evaluated."""
        nowhere = jnp.full(len(x), -jnp.inf, x.dtype)
        self.walkers = Walkers(x, nowhere, jnp.zeros_like(x), nowhere)

    def fill(self, fine: np.ndarray) -> None:
        """Give particles that are not `fine` the place of others."""
        good = np.flatnonzero(fine)
        self.key, now = jax.random.split(self.key)
        index = np.arange(len(fine))
        index[~fine] = good[np.asarray(jax.random.randint(now, ((~fine).sum(),), 0, len(good)))]
        self.walkers = jax.tree.map(lambda leaf: leaf[index], self.walkers)

    def here(self) -> Round:
        """The present cloud as a round of two equal steps, for want of a better one."""
        twice = lambda leaf: np.stack([np.asarray(leaf, float)] * 2)
        now, moved = self.walkers, np.zeros(len(self.walkers.x), bool)
        chains = Chains(twice(now.x), twice(now.log_density), twice(now.score), moved)
        return Round(chains, (1.0,), 0)

    def settle(self) -> None:
        """Descend to where the mass is: short trajectories, each particle with its own step."""
        level, fewest, limit = -np.inf, SETTLING[0], 0.3 * self.budget
        for count in range(SETTLING[1]):
            if self.runaway or self.spent > limit:
                return
            trace = self._window(length=np.inf, most=SHORT, gain=0.5, shared=False)
            late = trace.log_density[SNAPSHOTS // 2 :]
            good = late >= self._bar(late[-1])
            near = trace.x[SNAPSHOTS // 2 :][good].astype(float)[None]
            same = np.zeros(near.shape[:2], int)
            self.factor = modes.factor(modes.covariance(near, same), len(self.walkers.x))
            if count >= PATIENCE:
                self._relieve()
            new, spread = np.median(late), np.subtract(*np.quantile(late, [0.75, 0.25]))
            if count + 1 >= fewest and new - level < 0.1 * spread:
                return
            level = new

    def tune(self) -> None:
        """One step size for all, the metric, and the modes."""
        step = jnp.full_like(self.walkers.log_step, jnp.median(self.walkers.log_step))
        self.walkers = self.walkers._replace(log_step=step)
        limit = 0.5 * self.budget
        for _ in range(TUNING):
            if self.runaway or self.spent > limit:
                return
            self._relieve()
            trace = self._window(gain=0.3)
            self.learn(trace.x.astype(float))

    def round(self, length: int) -> Round | None:
        """A new round of `length` trajectories, tuned and then frozen; None if there is no budget for it."""
        self._relieve()
        self._window(gain=0.2)
        self.frozen = _Kept(max(1, length // KEPT))
        return self.extend(length)

    def extend(self, length: int) -> Round | None:
        """The last round, made longer: as many more trajectories as asked for, or as the budget allows."""
        kept = self.frozen
        if length // kept.thin + len(kept) > 2 * KEPT:
            kept.halve()
        for _ in range(max(1, length // (kept.thin * SNAPSHOTS))):
            if self.left < SNAPSHOTS * kept.thin or self.runaway:
                break
            kept.traces.append(self._window(gain=0.0, thin=kept.thin))
        if not len(kept) or self.runaway:
            return None
        chains = kept.chains()
        return Round(chains, self._shares(chains.x), len(kept) * kept.thin)

    def learn(self, x: Float[np.ndarray, "N M D"]) -> None:
        """Metric and modes from the clouds of a window or a round."""
        labels = np.zeros(x.shape[:2], int)
        if self.mixture is not None or moments(x).rhat.max() > UNMIXED:
            own = self._modes()[None]
            if own.max() > 0:
                first = modes.fit(np.asarray(self.walkers.x, float)[None], own)
                labels = modes.crossed(first.labels(x), SNAPSHOTS)
        self.mixture = modes.fit(x, labels) if len(np.unique(labels)) > 1 else None
        self.factor = modes.factor(modes.covariance(x, labels), labels.size)

    def _window(
        self,
        *,
        length: float = LENGTH,
        most: int = MOST,
        gain: float,
        shared: bool = True,
        thin: int = 1,
    ) -> _Seen:
        """Trajectories, then hops; the trace comes back as NumPy arrays."""
        most = max(1, min(most, self.left // (SNAPSHOTS * thin)))
        number = lambda value: jnp.asarray(value, self.dtype)
        tuning = Tuning(
            number(self.factor), number(length), jnp.int32(most), number(gain), jnp.asarray(shared)
        )
        self.key, now, later = jax.random.split(self.key, 3)
        self.walkers, trace = window(self.density, now, self.walkers, tuning, jnp.int32(thin))
        seen = _Seen(*(np.asarray(leaf) for leaf in trace))
        self.spent += int(seen.evaluations)
        self.cost = int(seen.evaluations) / (SNAPSHOTS * thin)
        if self.mixture is not None and self.left >= HOPS:
            mixture = Mixture(*(number(part) for part in self.mixture))
            self.walkers, _ = hop(self.density, later, self.walkers, mixture, HOPS)
            self.spent += HOPS
        return seen

    def _modes(self) -> np.ndarray:
        """A label for every particle, from the dips of the log density between neighbours."""
        walkers = self.walkers
        x = np.asarray(walkers.x, float)
        z = modes.whitened(x - x.mean(0), self.factor)
        pairs = modes.neighbours(z)
        between = []
        for stop in modes.STOPS:
            way = (1 - stop) * x[pairs[:, 0]] + stop * x[pairs[:, 1]]
            self.place(jnp.asarray(np.concatenate([way, x[:1]]), self.dtype))
            self.evaluate()
            between.append(np.asarray(self.walkers.log_density, float)[:-1])
        self.walkers = walkers
        ends = np.asarray(walkers.log_density, float)
        return modes.components(len(x), pairs, modes.barriers(z, pairs, ends, np.stack(between)))

    def _shares(self, x: np.ndarray) -> tuple[float, ...]:
        if self.mixture is None:
            return (1.0,)
        counts = np.bincount(self.mixture.labels(x).ravel(), minlength=1) / (
            x.shape[0] * x.shape[1]
        )
        return tuple(float(share) for share in np.sort(counts[counts > 0])[::-1])

    def _bar(self, log_density: np.ndarray) -> float:
        """The log density below which a particle is behind: no mode worth keeping is that much lower.

        In D dimensions a mode wider by a factor c in each has a maximum lower by D log c at equal mass.
        """
        return float(np.quantile(log_density, 0.75)) - (30 + 3 * self.walkers.x.shape[1])

    def _relieve(self) -> None:
        """Particles that are behind take the place of others."""
        level = np.asarray(self.walkers.log_density)
        behind = ~(level >= self._bar(level))
        if behind.any():
            self.fill(~behind)
