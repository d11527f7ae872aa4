"""Figure 2: Bayesian logistic regression on Covertype, and whether the plateau is the posterior's.

python -m experiments run logistic       # the figure: full data, minibatches of 50
python -m experiments run plateau        # a subset, where px.sample and NUTS give the posterior itself
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from experiments import covertype, logistic_tables, peers
from experiments.study import Evaluation, Figure, Run, Study, Table
from particlax import diagnostics
from particlax.diffusions import Blob, FixedScale, Transport
from particlax.metrics import Ensemble


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of figure 2."""

    particles: int = 100
    batch: int = 50
    steps: int = 10000
    adagrad: float = 2.0  # rate of the paper's methods, the best for SVGD among 0.5, 1, 2, 4
    gamma: float = 100.0  # u_i v_j of the paper's transport, times M
    sgld: float = 46.0  # SGLD's step is this over N, times (1 + t)^-0.55
    step_size: float = 0.15  # of flows in the Ensemble metric, up to `knee`; then it falls as 1 / t
    knee: int = 500
    seeds: int = 5
    data: str = "covertype"


@dataclasses.dataclass(frozen=True)
class SubsetConfig(Config):
    """Settings of the comparison with exact sampling."""

    rows: int = 10000
    seeds: int = 2
    nuts: bool = True  # beside px.sample; needs pip install particlax[peers]


POSTERIOR = logistic_tables.REFERENCE
EXACT, NUTS = "px.sample", "NumPyro NUTS"


@functools.cache
def flows(c: Config, num_data: int) -> dict[str, px.Flow]:
    """The samplers; built once, so that each is compiled once."""
    target = covertype.target(num_data)
    adagrad = optax.adagrad(c.adagrad)
    coupling = FixedScale(c.gamma / c.particles)
    falling = lambda t: c.step_size / (1 + jnp.maximum(t - c.knee, 0) / c.knee)
    inside: dict[str, Any] = {"step_size": falling, "metric": Ensemble(limit=2.0)}
    return {
        "SVGD": px.svgd(target, optimizer=adagrad),
        "w-SGLD": px.w_sgld(target, coupling=coupling, optimizer=adagrad),
        "w-SGLD-B": px.w_sgld_b(target, optimizer=adagrad),
        "pi-SGLD": px.pi_sgld(
            target, diffusion=Transport(coupling=coupling), optimizer=adagrad
        ),
        "SGLD": px.sgld(target, step_size=sgld_step(c, num_data)),
        "SVGD, Ensemble": px.svgd(target, **inside),
        "w-SGLD-B, Ensemble": px.w_sgld_b(target, **inside),
        "px.calibrated": px.calibrated(target, diffusion=Blob(calibrate=True), **inside),
    }  # fmt: skip


def sgld_step(c: Config, num_data: int) -> Callable[[Any], Any]:
    """SGLD's schedule."""
    return lambda t: c.sgld / num_data * (1.0 + t) ** -0.55


def marks(steps: int) -> list[int]:
    """The steps at which a run is evaluated: multiples of ten, ten to a decade."""
    decades = np.log10(max(steps, 10))
    grid = {10 * round(10**power / 10) for power in np.arange(1, decades + 1e-9, 0.1)}
    return sorted({*(step for step in grid if step <= steps), steps // 10 * 10})


def clouds(c: Config, name: str, split: covertype.Problem, seed: int) -> tuple[px.Result, Any]:
    """A sampler's run with every tenth cloud; its seconds are without compilation."""
    flow = flows(c, split.num_data)[name]
    data = px.Minibatches(split.train, c.batch)
    key = jax.random.key(seed)
    start = covertype.start(key, c.particles, split.dim)
    go = functools.partial(px.run, flow, start, steps=c.steps, data=data, thin=10, progress=False)
    if (c, name, split.num_data) not in WARM:
        go(key=jax.random.key(1000 + seed))
        WARM.add((c, name, split.num_data))
    return go(key=key), data


WARM: set[tuple[Config, str, int]] = set()


def fit(w: jax.Array, posterior: covertype.Normal) -> dict[str, float]:
    """Against the posterior: sd over its sd (deciles and median over weights), rms error of the mean in its sd."""
    cloud, sd = np.asarray(w, float), np.sqrt(np.diag(posterior.covariance))
    low, middle, high = np.quantile(cloud.std(0) / sd, [0.1, 0.5, 0.9])
    error = np.sqrt(np.mean(((cloud.mean(0) - posterior.mean) / sd) ** 2))
    return {"sd_low": low, "sd": middle, "sd_high": high, "mean_error": error}


def curve(c: Config, name: str, seed: int) -> Iterator[Evaluation]:
    """One sampler on one split, evaluated along the way."""
    split = covertype.problem(c.data, seed)
    posterior = covertype.laplace(c.data, seed)
    if name == POSTERIOR:
        began = time.perf_counter()
        w = jnp.asarray(posterior.draws(1000, seed), jnp.float32)
        seen = covertype.predict(w, split.test)
        yield Evaluation({"step": 0, **seen, **fit(w, posterior)}, time.perf_counter() - began)
        return
    result, data = clouds(c, name, split, seed)
    assert result.history is not None
    for step in marks(c.steps):
        w = jnp.asarray(result.history.particles["w"][step // 10 - 1])
        metrics = {"step": step, **covertype.predict(w, split.test)}
        if step == marks(c.steps)[-1]:
            metrics |= fit(w, posterior)
            if name == "SGLD":
                metrics |= noise(c, split, data, result.particles)
        yield Evaluation(metrics, result.seconds * step / c.steps)


def noise(c: Config, split: covertype.Problem, data: px.Minibatches, particles: Any) -> dict:
    """Injected over gradient noise at the last step: the median weight's, and the share of weights above 1."""
    last = float(sgld_step(c, split.num_data)(c.steps))
    ratio = diagnostics.noise_ratio(
        split.target, particles, data, step_size=last, key=jax.random.key(7), batches=512
    )["w"]
    return {"noise": np.median(ratio), "noise_above": np.mean(np.asarray(ratio) > 1)}


def runs(c: Config) -> Iterator[Run]:
    """Every sampler on every split."""
    settings = dataclasses.asdict(c)
    settings.pop("seeds")
    for seed in range(c.seeds):
        for name in (POSTERIOR, *flows(c, 1)):
            todo = lambda a=name, b=seed: curve(c, a, b)
            yield Run({"method": name, **settings}, seed, todo)


def exact(name: str, split: covertype.Problem, seed: int) -> tuple[jax.Array, dict]:
    """Draws of w from the posterior itself, by px.sample or NUTS with the full batch."""
    density = lambda p: split.target(p, split.train)
    point = {"w": jnp.zeros(split.dim), "log_alpha": jnp.array(0.0)}
    if name == NUTS:
        outcome = peers.nuts(peers.Problem(density, point), seed, dense=True)
        return outcome.draws["w"], {"notes": outcome.notes}
    result = px.sample(density, point, key=jax.random.key(seed), progress=False)
    return result.draws["w"], {"notes": "converged" if result.converged else "not converged"}


@functools.lru_cache(maxsize=1)
def truth(c: SubsetConfig, seed: int) -> tuple[jax.Array, dict, covertype.Normal, float]:
    """px.sample's draws, its notes, their mean and covariance, the seconds."""
    began = time.perf_counter()
    w, notes = exact(EXACT, covertype.problem(c.data, seed, c.rows), seed)
    drawn = np.asarray(w, float)
    moments = covertype.Normal(drawn.mean(0), np.cov(drawn.T))
    return w, notes, moments, time.perf_counter() - began


def subset(c: SubsetConfig, name: str, seed: int) -> Iterator[Evaluation]:
    """One sampler on a few training rows, evaluated at the end, beside px.sample's moments."""
    split = covertype.problem(c.data, seed, c.rows)
    w, notes, moments, seconds = truth(c, seed)
    began = time.perf_counter()
    if name == NUTS:
        w, notes = exact(name, split, seed)
    elif name != EXACT:
        w, notes = jnp.asarray(clouds(c, name, split, seed)[0].particles["w"]), {}
    seconds = seconds if name == EXACT else time.perf_counter() - began
    metrics = {**covertype.predict(w[:: max(1, len(w) // 1000)], split.test), **fit(w, moments)}
    yield Evaluation(metrics, seconds, notes)


def subset_runs(c: SubsetConfig) -> Iterator[Run]:
    """Exact samplers and flows on the same rows."""
    settings = dataclasses.asdict(c)
    settings.pop("seeds")
    settings.pop("nuts")
    for seed in range(c.seeds):
        for name in (EXACT, *((NUTS,) if c.nuts else ()), *flows(c, 1)):
            todo = lambda a=name, b=seed: subset(c, a, b)
            yield Run({"method": name, **settings}, seed, todo)


TINY = {"particles": 20, "steps": 40, "seeds": 2, "data": "synthetic"}
STUDY = Study(
    name="logistic",
    title="Figure 2: Bayesian logistic regression on Covertype",
    paper="A figure without numbers: SVGD, w-SGLD and w-SGLD-B converge to the same accuracy and likelihood; w-SGLD and "
    "w-SGLD-B converge slightly faster than SVGD.",
    takes="3 minutes",
    config=Config,
    runs=runs,
    tables={
        "logistic": Table("where the methods end", logistic_tables.plateau),
        "logistic-speed": Table(
            "when they come within half a point of the posterior's accuracy: median (range) over runs",
            logistic_tables.speed,
        ),
    },
    figures={"logistic": Figure(logistic_tables.CAPTION, logistic_tables.draw)},
    smoke=TINY,
)
PLATEAU = Study(
    name="plateau",
    title="Figure 2, checked: exact sampling on 10,000 rows of Covertype beside the flows",
    paper="Not in the paper.",
    takes="7 minutes",
    config=SubsetConfig,
    runs=subset_runs,
    tables={"plateau": Table("10,000 training rows", logistic_tables.subset)},
    smoke={**TINY, "seeds": 1, "rows": 200, "nuts": False},
)
