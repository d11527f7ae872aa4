"""Real posteriors with reference draws: `px.sample` as it comes, and other packages' samplers beside it.

python -m experiments run reference                  # needs pip install particlax[peers]
python -m experiments run reference --peers=false    # px.sample alone

Nothing is set per posterior. Errors are over the reported (constrained) parameters; seconds include compilation,
which no run inherits from another. PARTICLAX_POSTERIORDB says where the posteriors are.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

import particlax as px
from experiments import posteriors, report
from experiments.peers import PEERS, Outcome
from experiments.posteriors import Posterior
from experiments.study import Evaluation, Run, Study, Table

OURS = "px.sample"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    seeds: int = 3
    names: str = ""  # some of the posteriors, separated by commas
    peers: bool = True
    posteriordb: str = ""


def ours(posterior: Posterior, seed: int) -> Outcome:
    """`px.sample` with its defaults, from one point."""
    began = time.perf_counter()
    key = jax.random.key(seed)
    result = px.sample(posterior.log_density, posterior.point, key=key, progress=False)
    seconds = time.perf_counter() - began
    failed = [check.name for check in result.evidence if not check.passed]
    notes = "converged" if result.converged else f"not converged: {', '.join(failed)}"
    return Outcome(result.draws, result.evaluations, seconds, notes)


def errors(posterior: Posterior, outcome: Outcome) -> dict[str, float]:
    """The worst error of a mean, in reference sd, and the sd ratio furthest from one."""
    seen = np.asarray(jax.jit(jax.vmap(posterior.constrain))(outcome.draws), float)
    mean = np.max(np.abs(seen.mean(0) - posterior.mean) / posterior.sd)
    ratios = seen.std(0) / posterior.sd
    worst = ratios[np.argmax(np.abs(np.log(np.maximum(ratios, 1e-300))))]
    return {"mean": float(mean), "sd": float(worst)}


def one(load: Callable[[], Posterior], run: Callable, seed: int) -> Iterator[Evaluation]:
    """One sampler on one posterior, with nothing compiled beforehand."""
    posterior = load()
    jax.clear_caches()
    outcome = run(posterior, seed)
    metrics = {**errors(posterior, outcome), "gradients": outcome.gradients}
    yield Evaluation(metrics, outcome.seconds, {"notes": outcome.notes})


def runs(c: Config) -> Iterator[Run]:
    """Every sampler on every posterior with every seed."""
    folder = posteriors.home(c.posteriordb or None)
    if folder is None:
        raise SystemExit(
            "the posteriors are not there: set PARTICLAX_POSTERIORDB (or --posteriordb=) to their folder"
        )
    samplers: dict[str, Callable[[Posterior, int], Outcome]] = {OURS: ours}
    samplers |= PEERS if c.peers else {}
    for name in [name for name in c.names.split(",") if name] or list(posteriors.MODELS):
        if name not in posteriors.MODELS:
            raise SystemExit(f"no posterior {name!r}; there are {', '.join(posteriors.MODELS)}")
        load = functools.cache(lambda name=name: posteriors.load(name, folder))
        for seed in range(c.seeds):
            for sampler, run in samplers.items():
                todo = lambda a=load, b=run, s=seed: one(a, b, s)
                yield Run({"posterior": name, "sampler": sampler}, seed, todo)


def _furthest(ratios: list[float]) -> float:
    return max(ratios, key=lambda ratio: abs(np.log(max(ratio, 1e-300))))


def table(found: list[dict]) -> report.Rows:
    """A row per posterior, a column per sampler: worst mean error, worst sd ratio, median seconds."""
    samplers = list(dict.fromkeys(r["config"]["sampler"] for r in found))
    rows = [["posterior", *samplers]]
    for name in dict.fromkeys(r["config"]["posterior"] for r in found):
        cells = []
        for sampler in samplers:
            here = [r for r in found if r["config"] == {"posterior": name, "sampler": sampler}]
            mean = max(r["metrics"]["mean"] for r in here)
            ratio = _furthest([r["metrics"]["sd"] for r in here])
            seconds = np.median([r["seconds"] for r in here])
            cells.append(f"{mean:.2g}, {ratio:.3g}, {seconds:.1f} s")
        rows.append([name.split("-")[0], *cells])
    return rows


def summary(found: list[dict]) -> report.Rows:
    """A row per sampler: how often it was right, time and gradients over all posteriors."""
    samplers = list(dict.fromkeys(r["config"]["sampler"] for r in found))
    rows = [["sampler", "runs right", "worst mean error", "worst sd ratio", "seconds, all (longest)",
             "gradients, all", "time over px.sample's"]]  # fmt: skip
    total = {s: sum(r["seconds"] for r in found if r["config"]["sampler"] == s) for s in samplers}
    for sampler in samplers:
        here = [r for r in found if r["config"]["sampler"] == sampler]
        good = [r["metrics"]["mean"] < 0.1 and 0.9 < r["metrics"]["sd"] < 1.1 for r in here]
        longest = max(r["seconds"] for r in here)
        rows.append([
            sampler, f"{sum(good)} of {len(good)}",
            f"{max(r['metrics']['mean'] for r in here):.3g}",
            f"{_furthest([r['metrics']['sd'] for r in here]):.3g}",
            f"{total[sampler]:.0f} ({longest:.1f})",
            f"{sum(r['metrics']['gradients'] for r in here):.2g}",
            f"{total[sampler] / total[OURS]:.1f}",
        ])  # fmt: skip
    return rows


STUDY = Study(
    name="reference",
    title="px.sample as it comes on eight real posteriors, beside NUTS, SVGD and variational inference",
    paper="",
    takes="12 minutes",
    config=Config,
    runs=runs,
    tables={
        "reference": Table("worst mean error (sd), worst sd ratio, median seconds", table),
        "reference-summary": Table(
            "right: every mean within 0.1 sd, every sd within 10 %", summary
        ),
    },
    smoke={"seeds": 1, "names": "arK-arK", "peers": False},
)
