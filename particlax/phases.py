"""The phases of `px.sample`: settle near the target, tune, then rounds of exact sampling.

An ensemble moves in windows of a few trajectories. Between windows Python looks: it takes the covariance
of the cloud as the metric of the next window, gives particles that are hopelessly behind the place of others,
and fits a Gaussian to every mode. Nothing changes within a round, so a round is an exact Markov chain
for each particle, independent of the others.
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from particlax import modes
from particlax.checks import as_generator
from particlax.evidence import Chains, mixing, strangers
from particlax.moves import SNAPSHOTS, Density, Mixture, Numbers, Tuning, Walkers, hop, window

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


Points: TypeAlias = Float[Numbers, "M D"]


class Round(NamedTuple):
    """One round of exact sampling."""

    chains: Chains
    fresh: Bool[np.ndarray, " N"]
    """Whether there were hops between a cloud and the one before."""
    shares: tuple[float, ...]
    """Shares of the draws in each mode."""
    length: int
    """Trajectories of each chain."""
    lost: int
    """Proposals whose score was not finite though their log density was."""


class _How(NamedTuple):
    """The part of a `Tuning` that belongs to a phase."""

    gain: float
    length: float = LENGTH
    most: int = MOST
    shared: bool = True


LOOK = _How(gain=0.0, length=np.inf, most=1, shared=False)
SETTLE = _How(gain=0.5, length=np.inf, most=SHORT, shared=False)
TUNE, RETUNE, FROZEN = _How(gain=0.3), _How(gain=0.2), _How(gain=0.0)


class _Seen(NamedTuple):
    """A `Trace` on the host."""

    x: np.ndarray
    log_density: np.ndarray
    score: np.ndarray
    acceptance: np.ndarray
    moved: np.ndarray
    evaluations: np.ndarray
    lost: np.ndarray


class _Kept:
    """The clouds of a frozen round: of every `thin` trajectories, the last."""

    def __init__(self, thin: int):
        self.thin, self.trajectories, self.lost = thin, 0, 0
        self.traces: list[_Seen] = []
        self.fresh: list[np.ndarray] = []
        """Whether there were hops between a cloud and the one before."""

    def __len__(self) -> int:
        return sum(len(trace.x) for trace in self.traces)

    def add(self, trace: _Seen) -> None:
        """One more window."""
        self.traces.append(trace)
        self.fresh.append(np.arange(len(trace.x)) == 0)
        self.trajectories += len(trace.x) * self.thin
        self.lost += int(trace.lost)

    def halve(self) -> None:
        """Keep every other cloud, the later of two."""
        chains, fresh = self.chains(), np.concatenate(self.fresh)
        even = len(fresh) // 2 * 2
        x, log_density, score = (part[1:even:2] for part in chains[:3])
        few = np.zeros(0)
        self.traces = [_Seen(x, log_density, score, few, chains.moved, few, few)]
        self.fresh = [fresh[:even:2] | fresh[1:even:2]]
        self.thin *= 2

    def chains(self) -> Chains:
        """All clouds, one after the other in time."""
        join = lambda name: np.concatenate([getattr(t, name) for t in self.traces]).astype(float)
        moved = np.any([trace.moved for trace in self.traces], 0)
        return Chains(join("x"), join("log_density"), join("score"), moved)


class Ensemble:
    """Particles on their way to the target, and the budget they have left."""

    def __init__(self, density: Density, key: Array, x: Points, budget: int):
        self.density, self.key, self.budget, self.spent = density, key, budget, 0
        self.dtype = x.dtype
        # What is not worth compiling is done on the host.
        self.random = as_generator(jax.random.fold_in(key, 0))
        self.factor = np.eye(x.shape[1])
        self.mixture: modes.Gaussians | None = None
        self.frozen = _Kept(1)
        self.height = np.zeros(len(x))
        self.cost = 1.0
        """Score evaluations of a trajectory, lately."""
        self.fine = self.evaluate(x)
        """Which of the starting points have a finite log density."""

    @property
    def left(self) -> int:
        """Score evaluations left to each particle."""
        return self.budget - self.spent

    @property
    def runaway(self) -> bool:
        """Whether some coordinate has gone to infinity."""
        return not bool(np.all(np.abs(self.walkers.x) < RUNAWAY))

    def evaluate(self, x: Points) -> np.ndarray:
        """Put the particles at `x`; which of them have a finite log density and score there?

        A trajectory of one step of no length, from nowhere: the program that samples also evaluates.
        """
        x = np.asarray(x)
        nowhere = np.full(len(x), -np.inf, x.dtype)
        self.walkers = Walkers(x, nowhere, np.zeros_like(x), nowhere)
        self._trajectories(LOOK, thin=1, until=1)
        self.walkers = self.walkers._replace(log_step=np.full(len(x), np.log(0.1), x.dtype))
        return np.isfinite(np.asarray(self.walkers.log_density))

    def fill(self, fine: np.ndarray) -> None:
        """Give particles that are not `fine` the place of others."""
        good = np.flatnonzero(fine)
        index = np.arange(len(fine))
        index[~fine] = self.random.choice(good, (~fine).sum())
        self.walkers = jax.tree.map(lambda leaf: leaf[index], self.walkers)
        self.height = self.height[index]

    def here(self) -> Round:
        """The present cloud as a round of two equal steps, for want of a better one."""
        twice = lambda leaf: np.stack([np.asarray(leaf, float)] * 2)
        now, moved = self.walkers, np.zeros(len(self.walkers.x), bool)
        chains = Chains(twice(now.x), twice(now.log_density), twice(now.score), moved)
        return Round(chains, np.ones(2, bool), (1.0,), 0, 0)

    def settle(self) -> None:
        """Descend to where the mass is: short trajectories, each particle with its own step."""
        level, fewest, limit = -np.inf, SETTLING[0], 0.3 * self.budget
        for count in range(SETTLING[1]):
            if self.runaway or self.spent > limit:
                return
            trace = self._window(SETTLE)
            late = trace.log_density[SNAPSHOTS // 2 :]
            good = self.height >= self._bar(self.height)
            near = trace.x[SNAPSHOTS // 2 :, good].astype(float)
            self._shape(near, np.zeros(near.shape[:2], int), len(self.walkers.x))
            if count >= PATIENCE:
                self._relieve()
            new, spread = np.median(late), np.subtract(*np.quantile(late, [0.75, 0.25]))
            if count + 1 >= fewest and new - level < 0.1 * spread:
                return
            level = new

    def tune(self) -> None:
        """One step size for all, the metric, and the modes."""
        step = np.full_like(self.walkers.log_step, np.median(self.walkers.log_step))
        self.walkers = self.walkers._replace(log_step=step)
        limit = 0.5 * self.budget
        for _ in range(TUNING):
            if self.runaway or self.spent > limit:
                return
            trace = self._window(TUNE)
            first = np.arange(SNAPSHOTS) == 0
            self.learn(trace.x.astype(float), trace.log_density.astype(float), first)

    def round(self, length: int) -> Round | None:
        """A new round of `length` trajectories, tuned and then frozen; None if there is no budget for it."""
        if self.left >= 2 * SNAPSHOTS:
            self._window(RETUNE)
        self.frozen = _Kept(max(1, length // KEPT))
        return self.extend(length)

    def extend(self, length: int) -> Round | None:
        """The last round, made longer: as many more trajectories as asked for, or as the budget allows."""
        kept = self.frozen
        while length // kept.thin + len(kept) > 2 * KEPT:
            kept.halve()
        for _ in range(max(1, length // (kept.thin * SNAPSHOTS))):
            if self.left < SNAPSHOTS * kept.thin or self.runaway:
                break
            kept.add(self._window(FROZEN, kept.thin))
        if not len(kept) or self.runaway:
            return None
        chains = kept.chains()
        shares = self._shares(chains.x)
        return Round(chains, np.concatenate(kept.fresh), shares, kept.trajectories, kept.lost)

    def learn(
        self,
        x: Float[np.ndarray, "N M D"],
        log_density: Float[np.ndarray, "N M"],
        fresh: Bool[np.ndarray, " N"],
    ) -> None:
        """Metric and modes from the clouds of a window or a round."""
        labels, old, first = np.zeros(x.shape[:2], int), self.mixture, None
        apart = mixing(x, log_density).max() > UNMIXED or strangers(log_density) > 0
        if old is not None or apart:
            own, here = self._modes()[None], np.asarray(self.walkers.x, float)[None]
            if old is not None or own.max() > 0:
                first = modes.fit(here, own)
                first = first if old is None else modes.remembered(first, old, old.labels(here))
                labels = first.labels(x)
        seen, labels = labels, modes.crossed(labels, fresh)
        found = modes.fit(x, labels)
        found = found if first is None else modes.remembered(found, first, seen)
        self.mixture = found if np.isfinite(found.log_weight).sum() > 1 else None
        self._shape(x, labels, labels.size)

    def _shape(self, x: np.ndarray, labels: np.ndarray, num: int) -> None:
        """The metric from clouds; a coordinate that rounding holds together keeps a little spread."""
        least = 4 * float(jnp.finfo(self.dtype).eps) * np.abs(x).max((0, 1))
        self.factor = modes.factor(modes.covariance(x, labels) + np.diag(least**2), num)

    def _window(self, how: _How, thin: int = 1) -> _Seen:
        """Trajectories, then hops."""
        seen = self._trajectories(how, thin, SNAPSHOTS)
        self._measure(seen)
        if self.mixture is not None and self.left >= HOPS:
            self.key, now = jax.random.split(self.key)
            mixture = Mixture(*(part.astype(self.dtype) for part in self.mixture))
            walkers, _ = hop(self.density, now, self.walkers, mixture, HOPS)
            self.walkers = jax.tree.map(np.asarray, walkers)
            self.spent += HOPS
        return seen

    def _trajectories(self, how: _How, thin: int, until: int) -> _Seen:
        most = max(1, min(how.most, self.left // (until * thin)))
        number = lambda value: np.asarray(value, self.dtype)
        tuning = Tuning(
            factor=number(self.factor),
            length=number(how.length),
            most=np.asarray(most, np.int32),
            gain=number(how.gain),
            shared=np.asarray(how.shared),
        )
        self.key, now = jax.random.split(self.key)
        program = self.density, now, self.walkers, tuning, np.int32(thin)
        walkers, trace = window(*program, until=np.int32(until))
        self.walkers = jax.tree.map(np.asarray, walkers)
        seen = _Seen(*(np.asarray(leaf) for leaf in trace))
        self.spent += int(seen.evaluations)
        self.cost = int(seen.evaluations) / (until * thin)
        return seen

    def _modes(self) -> np.ndarray:
        """A label for every particle, from the dips of the log density between neighbours."""
        walkers, cost = self.walkers, self.cost
        x = np.asarray(walkers.x, float)
        if self.left < len(modes.STOPS) + SNAPSHOTS:
            return np.zeros(len(x), int)
        z = modes.whitened(x - x.mean(0), self.factor)
        pairs = modes.neighbours(z)
        between = []
        for stop in modes.STOPS:
            way = (1 - stop) * x[pairs[:, 0]] + stop * x[pairs[:, 1]]
            self.evaluate(np.concatenate([way, x[:1]]).astype(self.dtype))
            between.append(np.asarray(self.walkers.log_density, float)[:-1])
        self.walkers, self.cost = walkers, cost
        ends = np.asarray(walkers.log_density, float)
        return modes.components(len(x), pairs, modes.barriers(z, pairs, ends, np.stack(between)))

    def _shares(self, x: np.ndarray) -> tuple[float, ...]:
        if self.mixture is None:
            return (1.0,)
        counts = np.bincount(self.mixture.labels(x).ravel(), minlength=1) / (
            x.shape[0] * x.shape[1]
        )
        return tuple(float(share) for share in np.sort(counts[counts > 0])[::-1])

    def _bar(self, height: np.ndarray) -> float:
        """The height below which a particle is behind: no mode worth keeping is that much lower."""
        return float(np.quantile(height, 0.75)) - (30 + self.walkers.x.shape[1])

    def _relieve(self) -> None:
        """Particles that are behind take the place of others; only while each has a step of its own.

        The height is the log density plus the log volume that a particle moves in, as far as its last window shows:
        a wide mode lies low, and is not behind. Particles that did not move are taken to have the usual volume.
        """
        behind = ~(self.height >= self._bar(self.height))
        if behind.any():
            self.fill(~behind)

    def _measure(self, seen: _Seen) -> None:
        """The height of every particle in a window."""
        late = seen.x[SNAPSHOTS // 2 :].astype(float)
        sd = late.std(0)
        usual = np.maximum(np.median(sd, 0), np.finfo(float).tiny)
        volume = np.sum(np.log(np.where(sd > 0, sd, usual)), 1)
        self.height = seen.log_density[SNAPSHOTS // 2 :].astype(float).mean(0) + volume
