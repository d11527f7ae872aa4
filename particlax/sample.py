"""The front door: draws from a log density, with nothing to tune."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from particlax.checks import as_generator, as_key, positive, whole
from particlax.errors import OptionError, ParticleError, TargetError, known_options, told
from particlax.evidence import Check, Moments, judge, moments
from particlax.moves import SNAPSHOTS, Density
from particlax.particles import as_cloud, dimension, num_particles, replicate
from particlax.phases import Ensemble, Round
from particlax.target import Target

__all__ = ["Sample", "Summary", "sample"]

FEWEST = 16
"""Fewest particles: with fewer, differences between chains say too little."""
BUILT_IN = {"stein", "tails", "resolution", "gradient"}
"""Checks that more draws cannot mend."""
RETRIES = 12
"""How often a start without a finite log density is halved towards the given point."""


class Summary(eqx.Module):
    """A table of the coordinates: `rows[name][column]`; printed, it is the table."""

    rows: dict[str, dict[str, float]]
    verdict: str
    COLUMNS: ClassVar[tuple[str, ...]] = ("mean", "sd", "5%", "50%", "95%", "error", "ess", "rhat")

    def __repr__(self) -> str:
        width = max(map(len, self.rows))
        lines = [" " * width + "".join(f"{column:>11}" for column in self.COLUMNS)]
        for name, row in self.rows.items():
            cells = [f"{row[c]:11.4g}" for c in self.COLUMNS[:6]]
            lines.append(f"{name:<{width}}{''.join(cells)}{row['ess']:11.0f}{row['rhat']:11.3f}")
        return "\n".join([*lines, self.verdict])


class Sample(eqx.Module):
    """The outcome of `px.sample`."""

    draws: PyTree[Float[Array, "S ..."]]
    """Draws, taken over particles and time."""
    particles: PyTree[Float[Array, "M ..."]]
    """The final cloud."""
    converged: bool
    """Whether every check passed. Modes that no particle has reached are not seen by any check."""
    evidence: tuple[Check, ...]
    """The checks: name, whether passed, and what was seen."""
    chains: PyTree[Float[np.ndarray, "N M ..."]]
    """The clouds of the last round; axis 0 is time, axis 1 the particle."""
    modes: tuple[float, ...]
    """Shares of the draws in each mode that was found, largest first."""
    evaluations: int
    """Score evaluations over all particles."""
    seconds: float
    moments: Moments
    names: tuple[str, ...]
    """The coordinates in the order of `moments`."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """What the failed checks saw; where all passed, what they saw."""
        return tuple(check.text for check in self.evidence if self.converged or not check.passed)

    def summary(self, transform: Callable[[Any], Any] | None = None) -> Summary:
        """Mean, sd, quantiles, standard error of the mean, effective size and R-hat by coordinate.

        With `transform`, of what it makes of a point: lambda p: {"tau": jnp.exp(p["log_tau"])}.
        """
        draws, found, names = self.draws, self.moments, self.names
        if transform is not None:
            draws = _mapped(transform, draws, 1)
            names, (num, many) = _names(draws), jax.tree.leaves(self.chains)[0].shape[:2]
            flat = [
                np.asarray(leaf, float).reshape(num, many, -1)
                for leaf in jax.tree.leaves(_mapped(transform, self.chains, 2))
            ]
            found = moments(np.concatenate(flat, 2))
        leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(draws)]
        flat = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)
        low, middle, high = np.quantile(flat, [0.05, 0.5, 0.95], axis=0)
        columns = (found.mean, found.sd, low, middle, high, found.mean_error, found.ess, found.rhat)
        table = zip(names, *columns, strict=True)
        rows = {
            name: dict(zip(Summary.COLUMNS, map(float, row), strict=True)) for name, *row in table
        }
        return Summary(rows, str(self))

    def to_arviz(self, transform: Callable[[Any], Any] | None = None) -> Any:
        """The last round as ArviZ data, one chain for each particle; of what `transform` makes of a point, if it is given."""
        from particlax.export import to_arviz

        if transform is None:
            return to_arviz(self.particles, self.chains)
        return to_arviz(_mapped(transform, self.particles, 1), _mapped(transform, self.chains, 2))

    def __str__(self) -> str:
        verdict = "converged" if self.converged else "NOT converged"
        head = f"{verdict} after {self.evaluations:,} score evaluations in {self.seconds:.1f} s"
        mark = "+" if self.converged else "!"
        return "\n".join([head, *(f"  {mark} {reason}" for reason in self.reasons)])

    def __repr__(self) -> str:
        return str(self)


@known_options
def sample(
    log_density: Callable[..., Any] | Target,
    init: Any = None,
    *,
    key: Key[Array, ""] | Array,
    particles: PyTree = None,
    num_particles: int = 128,
    num_draws: int = 4000,
    tolerance: float = 0.015,
    budget: int = 100_000,
    progress: bool = True,
) -> Sample:
    """Draws from exp(log_density), with evidence that they are right, or a plain word that they are not.

    `init` is one point (any pytree) or a function from a key to a point; a ready cloud goes in as `particles=`.
    A cloud of `num_particles` settles from there, learns its own metric, step and modes, and then
    samples in rounds of Metropolis-adjusted trajectories, each twice as long as the one before, until all checks
    pass: the standard error of every mean (in sd) and of every sd (relative) is below `tolerance`,
    chains have mixed, halves of the ensemble and of the time agree, Stein's identity holds. `budget` is the
    most score evaluations of one particle. Where it ends first, `converged` is False and `reasons` says why.
    More draws than were kept (512 clouds or more) are draws repeated.

    >>> import particlax as px
    >>> result = px.sample(lambda x: -0.5 * jnp.sum(x**2), jnp.zeros(2), key=jax.random.key(0))
    >>> result.converged, result.draws.shape
    (True, (4000, 2))
    """
    began = time.perf_counter()
    target = log_density if isinstance(log_density, Target) else Target(log_density)
    _check(target, num_particles, num_draws, tolerance, budget)
    start_key, pick_key, key = jax.random.split(as_key(key), 3)
    cloud, centre = _start(init, particles, start_key, num_particles)
    density = Density.of(target, jax.tree.map(lambda leaf: leaf[0], cloud))
    names = _names(cloud)
    with _Note(progress) as note:
        ensemble = _ready(density, key, cloud, centre, budget)
        note("settling")
        ensemble.settle()
        note("tuning")
        ensemble.tune()
        done, evidence, found = _rounds(ensemble, num_draws, tolerance, names, note)
    mixed = all(check.passed for check in evidence if check.name == "mixing")
    evidence = [*evidence, _seen(done.shares, mixed)]
    x = done.chains.x
    unflatten = lambda flat: jax.tree.map(jnp.asarray, density.unflatten(flat))
    return Sample(
        draws=unflatten(_chosen(x, num_draws, pick_key)),
        particles=unflatten(ensemble.walkers.x),
        converged=all(check.passed for check in evidence),
        evidence=tuple(evidence),
        chains=density.unflatten(x),
        modes=done.shares,
        evaluations=ensemble.spent * len(ensemble.walkers.x),
        seconds=time.perf_counter() - began,
        moments=found,
        names=names,
    )


def _rounds(
    ensemble: Ensemble, num_draws: int, tolerance: float, names: tuple[str, ...], note: Any
) -> tuple[Round, list[Check], Moments]:
    """Rounds of doubling length until every check passes or the budget ends."""
    digits = float(jnp.finfo(ensemble.dtype).eps)
    least = -(-num_draws // len(ensemble.walkers.x))
    length = SNAPSHOTS * max(2, -(-least // SNAPSHOTS))
    best, more, lost = None, 0, 0
    while lost < 2 and (best is None or more or ensemble.left >= length * ensemble.cost):
        spent = ensemble.spent
        done = ensemble.extend(more) if more else ensemble.round(length)
        if done is None or ensemble.spent == spent:
            break
        found = moments(done.chains.x)
        evidence = judge(done.chains, found, tolerance=tolerance, names=list(names), digits=digits)
        evidence.append(_gradient(done))
        best = done, evidence, found
        failed = {check.name for check in evidence if not check.passed}
        if not failed:
            return best
        note(f"{done.length} trajectories: {', '.join(sorted(failed))} not yet")
        lost = lost + 1 if failed <= BUILT_IN else 0
        more = 0
        if failed == {"precision"}:  # all is well, there is only too little of it
            more = SNAPSHOTS * -(
                -int(done.length * min(found.shortfall(tolerance), 1.0)) // SNAPSHOTS
            )
        else:
            ensemble.learn(done.chains.x, done.chains.log_density, done.fresh)
            length = 2 * max(length, done.length)
    if best is not None and lost:
        return best
    return _ended(ensemble, best)


def _ended(ensemble: Ensemble, best: Any) -> tuple[Round, list[Check], Moments]:
    """What to say when the budget ends, or the particles run away, before the checks pass."""
    if ensemble.runaway:
        text = (
            "the particles run away to infinity: the density seems to have no finite integral. Give it a "
            "proper prior, and check its sign"
        )
    else:
        text = (
            f"the budget of {ensemble.budget} score evaluations for each particle has ended; a larger one may "
            "do, a better parametrisation more"
        )
    last = Check("budget", False, text)
    if best is None or ensemble.runaway:
        done = ensemble.here()
        return done, [last], moments(done.chains.x)
    return best[0], [*best[1], last], best[2]


def _gradient(done: Round) -> Check:
    if not done.lost:
        return Check("gradient", True, "the score was finite wherever the log density was")
    text = (
        f"at {done.lost} proposals the log density was finite but its gradient was not, so they were refused and that "
        "part of the space is missing. A jnp.where whose other branch is NaN does this"
    )
    return Check("gradient", False, text)


def _seen(shares: tuple[float, ...], mixed: bool) -> Check:
    parts = ", ".join(f"{share:.2f}" for share in shares)
    several = f"{len(shares)} modes were found, " + (
        f"with shares {parts}" if mixed else "with shares that are not known yet"
    )
    text = several if len(shares) > 1 else "one mode was found"
    return Check("modes", True, f"{text}; this says nothing of modes that no particle has reached")


def _check(target: Target, particles: int, draws: int, tolerance: float, budget: int) -> None:
    if target.log_density is None:
        raise OptionError(
            "the target has a likelihood with data; px.sample takes a plain log density. Give "
            "px.sample a function of the parameters that closes over all data"
        )
    whole("num_particles", particles, FEWEST)
    whole("num_draws", draws, 1)
    whole("budget", budget, 1000)
    positive("tolerance", tolerance, zero=False, schedule=False)


def _start(init: Any, particles: PyTree, key: Array, num: int) -> tuple[PyTree, PyTree]:
    """The first cloud, and the point it was made around, if there is one."""
    if (init is None) == (particles is None):
        came = "neither" if init is None else "both"
        raise OptionError(
            f"px.sample got {came} of init and particles; expected one of them: init=(a point, or a function "
            "of a key that gives one) or particles=(a cloud)"
        )
    if particles is not None:
        cloud = as_cloud(particles)
        if num_particles(cloud) < FEWEST:
            raise ParticleError(
                f"there are {num_particles(cloud)} particles; expected at least {FEWEST}, since px.sample "
                "judges itself by the differences between them"
            )
        return cloud, None
    if callable(init) and jax.tree.leaves(init) == [init]:  # a pytree that can be called is a point
        points = [init(one) for one in jax.random.split(key, num)]
        try:
            cloud = jax.tree.map(lambda *leaves: jnp.stack(leaves), *points)
        except (ValueError, TypeError) as error:
            raise OptionError(f"init(key) does not give points of one shape: {error}") from None
        return as_cloud(cloud), None
    try:
        many = jax.tree.map(np.asarray, replicate(init, num))
    except (ValueError, TypeError):
        raise OptionError(
            f"init is {init!r}; expected a point (arrays or numbers, in any pytree) or a function of a key"
        ) from None
    num_particles(many)
    random = as_generator(key)
    return jax.tree.map(lambda leaf: _around(leaf, random), many), jax.tree.map(
        lambda leaf: leaf[0], many
    )


def _around(leaf: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Normal noise around copies of a point, of size one, or more where one is lost in rounding."""
    size = np.maximum(1, np.sqrt(float(jnp.finfo(leaf.dtype).eps)) * np.abs(leaf))
    with np.errstate(invalid="ignore"):  # an infinite point is refused later, in words
        moved = (leaf + size * random.normal(size=leaf.shape)).astype(leaf.dtype)
    moved[0] = leaf[0]  # the given point itself is one of the particles
    return moved


def _ready(density: Density, key: Array, cloud: PyTree, centre: PyTree, budget: int) -> Ensemble:
    """An ensemble in which every particle has a finite log density."""
    if dimension(cloud) == 0:
        raise ParticleError("a point has no coordinates; expected at least one")
    x = density.flatten(cloud)
    if not np.all(np.isfinite(x)):
        raise ParticleError(
            "the starting points have NaN or infinite coordinates; expected finite numbers. Check init or particles"
        )
    try:
        jax.eval_shape(density.score, x)  # says what is wrong with the density before compiling it
    except jax.errors.TracerArrayConversionError as error:
        raise TargetError(
            "the log density turns its argument into a NumPy array; expected jax.numpy, which can be differentiated. "
            f"JAX says: {str(error).splitlines()[0]}"
        ) from None
    except jax.errors.ConcretizationTypeError as error:
        raise TargetError(
            "the log density asks for the value of a number that is not known while it is compiled; expected jnp.where in place of `if`, "
            f"jnp.log in place of math.log. JAX says: {str(error).splitlines()[0]}"
        ) from None
    ensemble = Ensemble(density, key, x, budget)
    fine = ensemble.fine
    if centre is not None:
        middle = density.flatten(jax.tree.map(lambda leaf: leaf[None], centre))
        for _ in range(RETRIES):
            if fine.all():
                break
            x = np.where(fine[:, None], x, 0.5 * (x + middle)).astype(x.dtype)
            fine = ensemble.evaluate(x)
    if not fine.any():
        raise TargetError(
            f"the log density or its gradient is NaN or infinite at all {len(x)} starting points"
            + ("" if centre is None else " around init")
            + "; expected a finite value at one of them at least. Start where the density is positive"
        )
    ensemble.fill(fine)
    return ensemble


def _mapped(transform: Any, points: PyTree, axes: int) -> PyTree:
    """`transform` of every point of a tree with so many axes before a point's own."""
    if not callable(transform):
        raise OptionError(
            f"transform is {told(transform)}; expected a function of one point, such as lambda p: {{'tau': jnp.exp(p['log_tau'])}}"
        )
    function = transform
    for _ in range(axes):
        function = jax.vmap(function)
    found = jax.jit(function)(jax.tree.map(jnp.asarray, points))
    if not jax.tree.leaves(found):
        raise OptionError("transform gave nothing; expected numbers or arrays: it needs `return`")
    return found


def _names(cloud: PyTree) -> tuple[str, ...]:
    short = _labels(cloud, lambda path: jax.tree_util.keystr(path, simple=True, separator="."))
    return short if len(set(short)) == len(short) else _labels(cloud, jax.tree_util.keystr)


def _labels(cloud: PyTree, told: Callable[[Any], str]) -> tuple[str, ...]:
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(cloud):
        base = told(path) or "x"
        places = np.ndindex(*leaf.shape[1:])
        names += [base + (f"[{','.join(map(str, at))}]" if at else "") for at in places]
    return tuple(names)


def _chosen(x: np.ndarray, num: int, key: Array) -> np.ndarray:
    """`num` of the draws, without repetition while there are enough."""
    flat = x.reshape(-1, x.shape[2])
    return flat[np.resize(as_generator(key).permutation(len(flat)), num)]


class _Note:
    """One line of progress."""

    def __init__(self, shown: bool):
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self.bar = Progress(*columns, transient=True)
        self.bar.disable = not (shown and self.bar.console.is_terminal)
        self.task = self.bar.add_task("compiling", total=None)

    def __call__(self, text: str) -> None:
        self.bar.update(self.task, description=text)

    def __enter__(self) -> "_Note":
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)
