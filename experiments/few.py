"""Few particles: where do deterministic flows come to rest, and with how much of the variance?

python -m experiments run few            # samplers; PARTICLAX_POSTERIORDB names the folder of the real posteriors
python -m experiments run kernels        # kernels and bandwidths instead

Every flow starts from a cloud drawn from the target and widened 1.5 times, so that what is measured is where it
comes to rest, not how it travels.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import particlax as px
from experiments import config, few_figure, posteriors, report
from experiments.study import Evaluation, Figure, Run, Study, Table
from particlax.diffusions import Blob
from particlax.kernels import IMQ, RBF, Kernel, Laplace, Median
from particlax.metrics import Ensemble


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the study."""

    steps: int = 3000
    step_size: float = 0.1  # of flows in the Ensemble metric; falls to 0.03 and 0.01 at the end
    learning_rate: float = 0.05  # of Adam, for flows in the identity metric
    limit: float = 2.0
    wider: float = 1.5
    seeds: int = 1
    targets: str = ""  # some of them, separated by semicolons
    samplers: str = ""  # likewise
    particles: tuple[int, ...] = (20, 50, 100, 200)
    posteriordb: str = ""


@dataclasses.dataclass(frozen=True)
class KernelConfig(Config):
    """Settings of the comparison of kernels."""

    particles: tuple[int, ...] = (100,)


class Problem(NamedTuple):
    """A target with draws and true moments, in flat coordinates."""

    log_density: Callable
    draws: Callable[[jax.Array, int], jax.Array]
    mean: np.ndarray
    covariance: np.ndarray


def known(density: px.zoo.Density) -> Problem:
    """A problem of the zoo."""
    return Problem(density.log_density, density.sample, density.mean, density.covariance)


def gaussian(dim: int, condition: float) -> Problem:
    """A rotated Gaussian whose variances go from 1 to `condition`."""
    rotation = np.linalg.qr(np.random.default_rng(dim).normal(size=(dim, dim)))[0]
    scales = np.geomspace(1, condition, dim)
    return known(px.zoo.Gaussian(np.ones(dim), rotation @ np.diag(scales) @ rotation.T))


def real(name: str, folder: Path) -> Problem:
    """A posterior with reference draws, in its unconstrained coordinates."""
    found = posteriors.load(name, folder)
    trees = [found.unconstrain(row) for row in found.draws]
    flatten = lambda tree: ravel_pytree(jax.tree.map(jnp.asarray, tree))[0]
    unravel = ravel_pytree(found.point)[1]
    flat = np.stack([np.asarray(flatten(tree), float) for tree in trees])

    def some(key: jax.Array, num: int) -> jax.Array:
        return jnp.asarray(flat)[jax.random.permutation(key, len(flat))[:num]]

    density = lambda x: found.log_density(unravel(x))
    return Problem(density, some, flat.mean(0), np.cov(flat.T))


def problems(folder: Path | None) -> dict[str, Callable[[], Problem]]:
    """All targets; the real posteriors where their folder is."""
    mixture = px.zoo.GaussianMixture([[-2.0, 0.0], [2.0, 0.0]], 1.0, [0.7, 0.3])
    found: dict[str, Callable[[], Problem]] = {
        "Gaussian, D = 2": lambda: gaussian(2, 10),
        "Gaussian, D = 10": lambda: gaussian(10, 10),
        "Gaussian, D = 10, condition 1e6": lambda: gaussian(10, 1e6),
        "Gaussian, D = 50": lambda: gaussian(50, 10),
        "banana": lambda: known(px.zoo.Banana()),
        "mixture": lambda: known(mixture),
        "Student t, D = 10": lambda: known(px.zoo.StudentT()),
        "log-gamma, D = 5": lambda: known(px.zoo.LogGamma(1.0, dim=5)),
    }
    if folder is not None:
        for name in posteriors.MODELS:
            found[name.split("-")[0]] = lambda name=name: real(name, folder)
    return found


def samplers(c: Config) -> dict[tuple[str, str], Callable[[px.Target], px.Flow]]:
    """Flows by sampler and treatment."""
    adam = optax.adam(optax.cosine_decay_schedule(c.learning_rate, c.steps, 0.02))
    cuts = {int(0.6 * c.steps): 0.3, int(0.85 * c.steps): 1 / 3}
    step = optax.piecewise_constant_schedule(c.step_size, cuts)
    inside: dict[str, Any] = {"step_size": step, "metric": Ensemble(c.limit)}
    makers: dict[str, Callable[..., px.Flow]] = {
        "svgd": lambda t, calibrate, **o: px.svgd(t, **o),
        "w_sgld": lambda t, calibrate, **o: px.w_sgld(t, calibrate=calibrate, **o),
        "w_sgld_b": lambda t, calibrate, **o: px.w_sgld_b(t, calibrate=calibrate, **o),
        "pi_sgld": lambda t, calibrate, **o: px.pi_sgld(
            t, diffusion=Blob(calibrate=calibrate), **o
        ),
    }
    treatments: dict[str, tuple[bool | str, dict]] = {
        "plain": (False, {"optimizer": adam}),
        "Ensemble": (False, inside),
        "calibrated": (True, inside),
        "safeguarded": ("matched", inside),
    }
    return {
        (name, how): lambda t, make=make, calibrate=calibrate, o=options: make(t, calibrate, **o)
        for name, make in makers.items()
        for how, (calibrate, options) in treatments.items()
        if not (name == "svgd" and calibrate)  # SVGD has no diffusion to calibrate
    }


def kernel_flows(c: Config) -> dict[tuple[str, str], Callable[[px.Target], px.Flow]]:
    """SVGD, blob and safeguarded blob in the Ensemble metric, by kernel and bandwidth (times med^2 / log M)."""
    cuts = {int(0.6 * c.steps): 0.3, int(0.85 * c.steps): 1 / 3}
    step = optax.piecewise_constant_schedule(c.step_size, cuts)
    inside: dict[str, Any] = {"step_size": step, "metric": Ensemble(c.limit)}
    shapes: dict[str, Kernel] = {
        f"{kind.__name__}, {scale:g}": kind(bandwidth=Median(scale))
        for kind in (RBF, IMQ, Laplace)
        for scale in (0.25, 1.0, 4.0)
    }
    flows = {}
    for name, kernel in shapes.items():
        flows |= {
            ("svgd", name): lambda t, k=kernel: px.svgd(t, kernel=k, **inside),
            ("blob", name): lambda t, k=kernel: px.w_sgld_b(t, kernel=k, **inside),
            ("blob, safeguarded", name): lambda t, k=kernel: px.w_sgld_b(
                t, kernel=k, calibrate="matched", **inside
            ),
        }
    return flows


def measures(x: jax.Array, problem: Problem) -> dict[str, float]:
    """How far the cloud's mean and covariance are from the truth's, in the truth's own units."""
    cloud = np.asarray(x, float)
    sd = np.sqrt(np.diag(problem.covariance))
    root = np.linalg.inv(np.linalg.cholesky(problem.covariance))
    own = root @ np.cov(cloud.T, bias=True) @ root.T
    ratio = cloud.std(0) / sd
    return {
        "mean": float(np.max(np.abs(cloud.mean(0) - problem.mean) / sd)),
        "covariance": float(np.linalg.norm(own - np.eye(len(sd))) / np.sqrt(len(sd))),
        "smallest sd": float(ratio.min()),
        "largest sd": float(ratio.max()),
        "variance": float(np.trace(own) / len(sd)),
    }


def one(c: Config, make: Callable | None, problem: Problem, num: int, seed: int) -> Evaluation:
    """Where a flow comes to rest: its measures, or why there are none. No flow: independent draws."""
    began = time.perf_counter()
    key = jax.random.fold_in(jax.random.key(seed), num)
    draws = problem.draws(key, num)
    if make is None:
        return Evaluation(measures(draws, problem), time.perf_counter() - began)
    mean = jnp.asarray(problem.mean, draws.dtype)
    start = mean + c.wider * (draws - mean)
    try:
        flow = make(px.Target(problem.log_density))
        cloud = px.run(flow, start, steps=c.steps, key=key, progress=False).particles
    except px.errors.ParticlaxError as error:
        why = "diverged" if isinstance(error, px.errors.NonFiniteError) else "needs more particles"
        return Evaluation({}, time.perf_counter() - began, {"failed": why})
    return Evaluation(measures(jnp.asarray(cloud), problem), time.perf_counter() - began)


def runs(c: Config) -> Iterator[Run]:
    """Every flow on every target with every number of particles."""
    everything = problems(posteriors.home(c.posteriordb or None))
    flows = kernel_flows(c) if isinstance(c, KernelConfig) else samplers(c)
    some = config.chosen("sampler", c.samplers, sorted({sampler for sampler, _ in flows}))
    flows = {what: make for what, make in flows.items() if what[0] in some}
    common = {"steps": c.steps, "step_size": c.step_size}
    common |= {"learning_rate": c.learning_rate, "wider": c.wider}
    for name in config.chosen("target", c.targets, everything):
        problem = functools.cache(everything[name])
        for num in c.particles:
            for (sampler, how), make in {("draws", ""): None, **flows}.items():
                settings = {
                    "target": name,
                    "M": num,
                    "sampler": sampler,
                    "treatment": how,
                    **common,
                }
                for seed in range(c.seeds):
                    todo = lambda m=make, p=problem, n=num, s=seed: [one(c, m, p(), n, s)]
                    yield Run(settings, seed, todo)


ORDER = [(s, t) for s in ("svgd", "w_sgld", "w_sgld_b", "pi_sgld")
         for t in ("plain", "Ensemble", "calibrated", "safeguarded")]  # fmt: skip


def pick(found: list[dict], flow: tuple[str, str], target: str, num: int) -> dict | None:
    """The record of one flow on one target."""
    for r in found:
        c = r["config"]
        if (c["sampler"], c["treatment"], c["target"], c["M"]) == (*flow, target, num):
            return r
    return None


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0e}"


def _cell(record: dict | None, *names: str) -> str:
    if record is None or record.get("failed") == "needs more particles":
        return "-"
    if not record["metrics"]:
        return record["failed"]
    return " / ".join(_short(record["metrics"][name]) for name in names)


def table(found: list[dict], num: int) -> report.Rows:
    """For one number of particles: sd over the true sd, smallest and largest over coordinates."""
    flows = [("draws", ""), ("svgd", "plain"), ("svgd", "Ensemble"), *ORDER[9:12]]
    targets = dict.fromkeys(r["config"]["target"] for r in found)
    rows = [["target", *("independent draws" if s == "draws" else f"{s}, {t}" for s, t in flows)]]
    for name in targets:
        cells = (pick(found, flow, name, num) for flow in flows)
        rows.append([name, *(_cell(r, "smallest sd", "largest sd") for r in cells)])
    return rows


def grid(found: list[dict], num: int) -> report.Rows:
    """For one number of particles, every flow on every target: error of the mean / of the covariance."""
    targets = list(dict.fromkeys(r["config"]["target"] for r in found))
    rows = [["sampler", "treatment", *targets]]
    for flow in [("draws", ""), *ORDER]:
        seen = [pick(found, flow, name, num) for name in targets]
        if any(r is not None for r in seen):
            rows.append([*flow, *(_cell(r, "mean", "covariance") for r in seen)])
    return rows


def summary(found: list[dict]) -> report.Rows:
    """By flow and number of particles: the median over targets of the covariance's and the mean's error."""
    nums = sorted({r["config"]["M"] for r in found})
    rows = [["sampler", "treatment", *(f"M = {num}" for num in nums)]]
    for sampler, how in [("draws", ""), *ORDER]:
        cells = []
        for num in nums:
            here = [
                r for r in found
                if (r["config"]["sampler"], r["config"]["treatment"], r["config"]["M"])
                == (sampler, how, num)
            ]  # fmt: skip
            possible = [r for r in here if r.get("failed") != "needs more particles"]
            errors = [r["metrics"].get("covariance", np.inf) for r in possible]
            means = [r["metrics"].get("mean", np.inf) for r in possible]
            lost = sum(not error < 1000 for error in errors)
            text = f"{np.median(errors):.2f}, {np.median(means):.2f}" if errors else "-"
            cells.append(text + (f" ({lost} diverged)" if lost else ""))
        if any(text != "-" for text in cells):
            rows.append([sampler, how, *cells])
    return rows


def by_kernel(found: list[dict]) -> report.Rows:
    """By kernel: the median over targets of the covariance's error, for each sampler."""
    samplers = [s for s in dict.fromkeys(r["config"]["sampler"] for r in found) if s != "draws"]
    rows = [["kernel, bandwidth over med² / log M", *samplers]]
    for kernel in dict.fromkeys(
        r["config"]["treatment"] for r in found if r["config"]["treatment"]
    ):
        cells = []
        for sampler in samplers:
            here = [
                r
                for r in found
                if (r["config"]["sampler"], r["config"]["treatment"]) == (sampler, kernel)
            ]
            cells.append(
                _short(float(np.median([r["metrics"].get("covariance", np.inf) for r in here])))
            )
        rows.append([kernel, *cells])
    return rows


TINY = {"steps": 20, "targets": "Gaussian, D = 2", "particles": (100,)}
STUDY = Study(
    name="few",
    title="Few particles: the variance that samplers keep, on 16 targets",
    paper="",
    takes="an hour",
    config=Config,
    runs=runs,
    tables={
        "few-summary": Table("median over targets: covariance error, mean error", summary),
        "few-sd": Table("100 particles: sd over the true sd", lambda found: table(found, 100)),
        **{
            f"few-{num}": Table(
                f"{num} particles: error of the mean / of the covariance",
                lambda found, num=num: grid(found, num),
            )
            for num in (20, 50, 100, 200)
        },
    },
    figures={"few": Figure(few_figure.CAPTION, few_figure.draw)},
    smoke={**TINY, "samplers": "svgd; pi_sgld"},
)
KERNELS = Study(
    name="kernels",
    title="Few particles: kernels and bandwidths",
    paper="",
    takes="20 minutes",
    config=KernelConfig,
    runs=runs,
    tables={"kernels": Table("median covariance error over targets", by_kernel)},
    smoke={**TINY, "samplers": "svgd"},
)
