"""Bayesian neural network regression on the UCI sets, as in Liu & Wang (2016), section 5.

python -m experiments run uci                              # nine sets, their standard splits
python -m experiments run uci --sets=yacht --splits=5      # less
python -m experiments run uci --part=validation            # how settings were compared: no test row is looked at

The model is theirs: y normal around one hidden layer of 50 ReLU units (100 for protein) with precision gamma, all weights and
biases normal around 0 with precision lambda, Gamma(1, 0.1) priors on both, which are learned in each of M = 20 particles as
logarithms; batches of 100 (1000 for protein); inputs and outputs standardised on the training rows; scores in the units of y.

Of their code (github.com/dilinwang820/Stein-Variational-Gradient-Descent, python/bayesian_nn.py) we keep

- the start: weights N(0, 1 / (inputs + 1)) in each layer, biases 0, gamma by the first residuals, lambda drawn as 0.1 Exp(1);
- RMSprop with memory 0.9 ("Adagrad with momentum"), 1e-6 beside the root;
- a development set, a tenth of the training rows and at most 500, which only the noise is tuned on.

We changed, each by what it does on validation rows (docs/regression.md):

- 4000 steps from 1e-2 down to 1 % of it along a cosine, where they take 2000 steps of 1e-3;
- log lambda moves `slow` times as fast as the rest. The joint density of weights and lambda has its highest mode at the empty network
  (w = 0, lambda = thousands), and a flow of 20 particles in 700 dimensions goes there (boston and wine did within 4000 steps). Their short
  runs stop long before; so do ours, for lambda alone;
- the noise: they replace each particle's by its own error on the development set; we widen all by one factor, at least 1,
  the best for the mixture there.

"SVGD, released settings" has none of these changes.

Batches are random without replacement, where theirs go round in order. Start and batches are the same for all methods on a split.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from experiments import config, datasets, uci_tables
from experiments.fetching import UCI
from experiments.study import Evaluation, Run, Study, Table
from particlax import predictive
from particlax.diffusions import FixedScale, Transport
from particlax.integrators import RMS, Optax

SYNTHETIC = "synthetic"
LARGE = "protein"  # twice the units, ten times the batch
WEIGHTS = ("w1", "b1", "w2", "b2")
RELEASED = "SVGD, released settings"
Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the study."""

    sets: tuple[str, ...] = tuple(UCI)
    splits: int = 20  # or as many as a set has
    particles: int = 20
    hidden: int = 50
    batch: int = 100
    steps: int = 4000
    step_size: float = 1e-2  # at the start
    final: float = 0.01  # the share of it that is left at the end, along a cosine
    decay: float = 0.9
    slow: float = 0.25  # how fast log lambda moves, beside the rest
    sgld: float = 2e-2  # SGLD's step, with the same cosine
    shape: float = 1.0  # of the Gamma priors
    rate: float = 0.1
    gamma: float = 0.1  # u_i v_j of the transport
    development: float = 0.1  # the share of the training rows that the noise is tuned on
    tuning: str = "widened"  # all by one factor; or replaced: each by the particle's own error
    methods: str = ""  # some of them, separated by semicolons
    part: str = "test"  # or validation: rows cut from the training part in place of the test rows


def settings(c: Config, method: str) -> Config:
    """The settings of a method: all share one, but for the row that has those of the released code."""
    if method != RELEASED:
        return c
    theirs = {"step_size": 1e-3, "final": 1.0, "slow": 1.0, "tuning": "replaced"}
    return dataclasses.replace(c, steps=min(c.steps, 2000), **theirs)


class Problem(NamedTuple):
    """One split: standardised training rows; other rows with y as it was; mean and sd of the training y."""

    x: np.ndarray
    y: np.ndarray
    dev_x: np.ndarray
    dev_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    mean: float
    sd: float


@functools.cache
def read(name: str) -> datasets.Regression:
    """A set with its splits; `synthetic` is a small one that needs no file."""
    if name != SYNTHETIC:
        return datasets.uci(name)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)) * [1, 10, 0] + [0, 5, 2]
    y = 100 + 20 * np.sin(x[:, 0]) + x[:, 1] + rng.normal(size=120)
    return datasets.Regression(x, y, np.stack([rng.permutation(120)[:12] for _ in range(2)]))


def problem(c: Config, name: str, split: int) -> Problem:
    """The split, its training rows shuffled, in parts; no test row is used where `part` is validation."""
    for key, value, known in (
        ("part", c.part, ("test", "validation")),
        ("tuning", c.tuning, ("widened", "replaced")),
    ):
        if value not in known:
            raise SystemExit(f"--{key}={value}: expected {' or '.join(known)}")
    found = read(name)
    test = found.test_index[split]
    train = np.setdiff1d(np.arange(len(found.y)), test)
    train = np.random.default_rng(split).permutation(train)
    if c.part == "validation":
        test, train = train[: len(test)], train[len(test) :]
    size = min(round(c.development * len(train)), 500)
    dev, train = train[:size], train[size:]
    x, y = found.x[train], found.y[train]
    scale = np.where(np.ptp(x, axis=0) > 0, x.std(0), 1)  # some columns are constant
    standard = lambda rows: ((found.x[rows] - x.mean(0)) / scale).astype(np.float32)
    mean, sd = float(y.mean()), float(y.std())
    return Problem(
        standard(train), ((y - mean) / sd).astype(np.float32),
        standard(dev), found.y[dev], standard(test), found.y[test], mean, sd,
    )  # fmt: skip


def output(params: Params, x: jax.Array) -> jax.Array:
    """The network's prediction of the standardised y."""
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def noise(params: Params) -> jax.Array:
    """The sd of the standardised y around the prediction."""
    return jnp.exp(-0.5 * params["log_gamma"])


def target(c: Config, num_data: int) -> px.Target:
    """log p(y | x, w, gamma) + log p(w | lambda) + log p(log gamma) + log p(log lambda), up to a constant.

    Particles hold log lambda / slow as `slow_lambda`: a step of the same size moves log lambda `slow` times as far.
    """

    def log_gamma_density(log_value: jax.Array) -> jax.Array:
        return c.shape * log_value - c.rate * jnp.exp(log_value)  # of log v where v ~ Gamma

    def log_prior(params: Params) -> jax.Array:
        log_lambda = c.slow * params["slow_lambda"]
        squares = jnp.stack([jnp.sum(params[name] ** 2) for name in WEIGHTS]).sum()
        num = sum(params[name].size for name in WEIGHTS)
        normal = 0.5 * num * log_lambda - 0.5 * jnp.exp(log_lambda) * squares
        return normal + log_gamma_density(log_lambda) + log_gamma_density(params["log_gamma"])

    def log_likelihood(params: Params, batch: Params) -> jax.Array:
        error = output(params, batch["x"]) - batch["y"]
        log_gamma = params["log_gamma"]
        return 0.5 * (log_gamma - jnp.log(2 * jnp.pi) - jnp.exp(log_gamma) * error**2)

    return px.Target(log_prior=log_prior, log_likelihood=log_likelihood, num_data=num_data)


def start(c: Config, hidden: int, x: jax.Array, y: jax.Array, key: jax.Array) -> Params:
    """One particle as theirs start; its gamma is that of the residuals on 1000 rows."""
    inner, outer, last = jax.random.split(key, 3)
    columns = x.shape[1]
    params = {
        "w1": jax.random.normal(inner, (columns, hidden)) / np.sqrt(columns + 1),
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(outer, (hidden,)) / np.sqrt(hidden + 1),
        "b2": jnp.zeros(()),
    }
    error = output(params, x[:1000]) - y[:1000]
    log_lambda = jnp.log(c.rate * jax.random.gamma(last, c.shape))
    return params | {"log_gamma": -jnp.log(jnp.mean(error**2)), "slow_lambda": log_lambda / c.slow}


@functools.partial(jax.jit, static_argnums=(0, 1))
def starts(c: Config, hidden: int, rows: Params, key: jax.Array) -> Params:
    """All particles."""
    one = functools.partial(start, c, hidden, rows["x"], rows["y"])
    return jax.vmap(one)(jax.random.split(key, c.particles))


@functools.cache
def flows(c: Config, num_data: int) -> dict[str, px.Flow]:
    """The methods; built once for a set, so that each is compiled once."""
    goal = target(c, num_data)
    rms = optax.rmsprop(
        optax.cosine_decay_schedule(c.step_size, c.steps, c.final),
        decay=c.decay, eps=1e-6, eps_in_sqrt=False, bias_correction=True,
    )  # fmt: skip
    falling = optax.cosine_decay_schedule(c.sgld, c.steps, c.final)
    coupling = FixedScale(c.gamma)
    return {
        uci_tables.ENSEMBLE: px.Flow(goal, (px.Drift(),), Optax(rms)),
        "SGLD": px.sgld(goal, integrator=RMS(falling, epsilon=1e-6)),
        "SVGD": px.svgd(goal, optimizer=rms),
        "w-SGLD": px.w_sgld(goal, coupling=coupling, optimizer=rms),
        "w-SGLD-B": px.w_sgld_b(goal, optimizer=rms),
        "pi-SGLD": px.pi_sgld(goal, diffusion=Transport(coupling=coupling), optimizer=rms),
        RELEASED: px.svgd(goal, optimizer=rms),
    }


def predicted(particles: Params, x: np.ndarray, split: Problem) -> predictive.Normal:
    """The mixture of the particles' normals, in the units of y."""
    seen = predictive.normal(output, particles, x, noise=noise)
    means = seen.means.astype(np.float64) * split.sd + split.mean
    return predictive.Normal(means, seen.sds * split.sd)


def with_noise(seen: predictive.Normal, sds: np.ndarray) -> predictive.Normal:
    """The same means with other sds."""
    return predictive.Normal(seen.means, sds)


def best_factor(seen: predictive.Normal, y: np.ndarray) -> float:
    """The factor on all sds, from 1 to 5, that is best for the mixture's log-likelihood of y."""
    value = lambda factor: with_noise(seen, factor * seen.sds).log_density(y).mean()
    return float(max(np.geomspace(1, 5, 81), key=value))


def tuned(c: Config, particles: Params, split: Problem) -> np.ndarray:
    """The particles' sds in the units of y, after a look at the development set."""
    seen = predicted(particles, split.dev_x, split)
    if c.tuning == "replaced":
        return np.sqrt(np.mean((seen.means - split.dev_y) ** 2, axis=1, keepdims=True))
    return best_factor(seen, split.dev_y) * seen.sds


def evaluate(c: Config, particles: Params, split: Problem) -> dict[str, Any]:
    """Scores of the mixture and, on average, of single particles; and what the particles hold."""
    plain, y = predicted(particles, split.test_x, split), split.test_y
    sds = tuned(c, particles, split) if len(split.dev_y) else plain.sds
    seen = with_noise(plain, sds)
    score = seen.score(y)
    own = [predictive.Normal(seen.means[[m]], sds[[m]]).score(y) for m in range(len(sds))]
    return {
        "rmse": score.rmse, "ll": score.log_density, "coverage": score.coverage,
        "single_rmse": np.mean([s.rmse for s in own]), "single_ll": np.mean([s.log_density for s in own]),
        "untuned_ll": plain.score(y).log_density, "factor": np.mean(sds / plain.sds),
        "noise": plain.sds.mean(), "disagreement": np.sqrt(np.mean(plain.means.var(0))),
        "lambda": np.exp(np.median(c.slow * np.asarray(particles["slow_lambda"]))),
    }  # fmt: skip


def work(c: Config, name: str, method: str, split: int) -> Iterator[Evaluation]:
    """One method on one split."""
    given = problem(c, name, split)
    units, size = (2 * c.hidden, 10 * c.batch) if name == LARGE else (c.hidden, c.batch)
    flow = flows(c, len(given.y))[method]
    batches = px.Minibatches({"x": given.x, "y": given.y}, min(size, len(given.y)))
    key = jax.random.key(split)
    cloud = starts(c, units, batches.arrays, key)
    began = time.perf_counter()
    result = px.run(flow, cloud, steps=c.steps, key=key, data=batches, progress=False)
    jax.block_until_ready(result.particles)
    seconds = time.perf_counter() - began
    yield Evaluation(evaluate(c, result.particles, given), seconds)


def runs(c: Config) -> Iterator[Run]:
    """Every method on every split of every set."""
    wanted = config.chosen("method", c.methods, flows(c, 1))
    for name in config.chosen("set", ";".join(c.sets), [*UCI, SYNTHETIC]):
        splits = min(c.splits, 2 if name == SYNTHETIC else UCI[name][1])
        for method in wanted:
            own = settings(c, method)
            noted = dataclasses.asdict(own)
            for key in ("sets", "splits", "methods"):
                noted.pop(key)
            for split in range(splits):
                todo = lambda a=own, b=name, m=method, s=split: work(a, b, m, s)
                yield Run({"set": name, "method": method, **noted}, split, todo)


STUDY = Study(
    name="uci",
    title="Beyond the paper: Bayesian neural network regression on nine UCI sets",
    paper="Not in the paper. Liu and Wang (2016), SVGD with 20 particles, RMSE / log-likelihood: boston 2.957 / -2.504, concrete 5.324 / -3.082, "
    "energy 1.374 / -1.767, kin8nm 0.090 / 0.984, naval 0.004 / 4.089, power 4.033 / -2.815, protein 4.606 / -2.947, wine 0.609 / -0.925, "
    "yacht 0.864 / -1.225.",
    takes="3 hours",
    config=Config,
    runs=runs,
    tables={
        "uci-against": Table("our means beside the published ones", uci_tables.against),
        "uci-rmse": Table("test RMSE", lambda found: uci_tables.scores(found, "rmse")),
        "uci-ll": Table("test log-likelihood", lambda found: uci_tables.scores(found, "ll")),
        "uci-pairs-rmse": Table(
            "RMSE minus the ensemble's", lambda found: uci_tables.pairs(found, "rmse")
        ),
        "uci-pairs-ll": Table(
            "log-likelihood minus the ensemble's", lambda found: uci_tables.pairs(found, "ll")
        ),
        "uci-validation": Table("validation rows, SVGD", uci_tables.validation),
        "uci-insides": Table("what the particles hold", uci_tables.insides),
    },
    smoke={
        "sets": (SYNTHETIC,),
        "particles": 4,
        "hidden": 5,
        "batch": 20,
        "steps": 30,
        "methods": "ensemble; SGLD; pi-SGLD",
    },
)
