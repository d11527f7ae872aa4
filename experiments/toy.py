"""The paper's toy study: figure 1 (2000 particles), the appendix figure (50), and their tables.

python -m experiments run toy                           # 5 seeds, about 25 minutes
python -m experiments run toy --seeds=1 --variants=false --record=demo   # what `make demo` does
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from experiments import records, report
from experiments.study import Evaluation, Figure, Run, Study, Table
from particlax import diagnostics
from particlax.diffusions import Blob, FixedScale, Langevin, Transport
from particlax.kernels import RBF, Median


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the toy study."""

    particles: int = 2000
    few: int = 50
    steps: int = 1000
    learning_rate: float = 0.05
    start: float = 4.0  # particles start uniformly in the box of this half-width
    scale: float = 1 / 16  # bandwidth of every kernel, in units of med^2 / log M
    gamma: float = 200.0  # u_i v_j of the paper's transport, times M
    stein: float = 1000.0  # lambda_1 of pi-SGLD with transport
    euler: float = 0.02  # step of noisy and calibrated flows
    chain_step: float = 0.02  # the SGLD chain: one particle, every `chain_thin`-th of its steps
    chain_thin: int = 10
    seeds: int = 5
    densities: tuple[str, ...] = ("U1", "U2", "U3", "U4")
    variants: bool = True  # pi-SGLD with blob and with noise too


DENSITIES = {name: getattr(px.zoo, name)() for name in ("U1", "U2", "U3", "U4")}
FIGURE_ROWS = ("SGLD", "w-SGLD", "w-SGLD-B", "SVGD", "pi-SGLD")


def samplers(c: Config, num: int) -> dict[str, Callable[[px.Target], px.Flow]]:
    """The rows of the study. The first four use one optimizer, the others plain Euler steps."""
    kernel = RBF(bandwidth=Median(scale=c.scale))
    coupling = FixedScale(c.gamma / num, lam=Median(scale=c.scale))
    adam = optax.adam(c.learning_rate)
    rows: dict[str, Callable[[px.Target], px.Flow]] = {
        "w-SGLD": lambda t: px.w_sgld(t, coupling=coupling, optimizer=adam),
        "w-SGLD-B": lambda t: px.w_sgld_b(t, kernel=kernel, optimizer=adam),
        "SVGD": lambda t: px.svgd(t, kernel=kernel, optimizer=adam),
        "pi-SGLD": lambda t: px.pi_sgld(
            t, stein=c.stein, kernel=kernel, diffusion=Transport(coupling=coupling), optimizer=adam
        ),
        "w-SGLD, calibrated": lambda t: px.w_sgld(
            t, coupling=coupling, calibrate=True, step_size=c.euler
        ),
    }
    if c.variants:
        rows |= {
            "pi-SGLD, blob": lambda t: px.pi_sgld(
                t, kernel=kernel, diffusion=Blob(kernel=kernel), optimizer=adam
            ),
            "pi-SGLD, noise": lambda t: px.pi_sgld(
                t, kernel=kernel, diffusion=Langevin(), step_size=c.euler
            ),
        }
    return rows


def chain(c: Config, target: px.Target, num: int, key: jax.Array) -> jax.Array:
    """SGLD as one chain of `num` samples, thinned, from the origin."""
    flow = px.sgld(target, step_size=c.chain_step)
    steps, start = num * c.chain_thin, jnp.zeros((1, 2))
    result = px.run(flow, start, steps=steps, key=key, thin=c.chain_thin, progress=False)
    assert result.history is not None
    return jnp.asarray(result.history.particles[:, 0])


def moved(c: Config, flow: px.Flow, start: jax.Array, key: jax.Array) -> tuple[jax.Array, dict]:
    """The cloud after `steps` steps, and the root mean square of each force on it."""
    state = px.run(flow, start, steps=c.steps, key=key, progress=False).state
    forces = jax.jit(flow.step)(key, state)[1].forces
    return jnp.asarray(state.particles), {k: float(f"{v:.3g}") for k, v in forces.items()}


def evaluate(density: px.zoo.Density, cloud: jax.Array, seed: int) -> dict:
    """W2, MMD^2, KSD, shares and variance of a cloud against the truth."""
    truth = density.systematic(jax.random.key(1000 + seed), len(cloud))  # pyright: ignore
    score = px.Target(density.log_density).score(cloud)[1]
    return {
        "W2": diagnostics.wasserstein2(cloud, truth),
        "MMD2": diagnostics.mmd2(cloud, truth, RBF(bandwidth=2.0)),
        "KSD": diagnostics.ksd(cloud, score),
        "shares": diagnostics.mode_shares(cloud, density) / density.shares,
        "variance": np.trace(np.cov(np.asarray(cloud).T)) / np.trace(density.covariance),
    }


def work(c: Config, num: int, name: str, row: str, seed: int) -> Iterator[Evaluation]:
    """One sampler on one density."""
    density = DENSITIES[name]
    target = px.Target(density.log_density)
    key = jax.random.fold_in(jax.random.key(seed), list(DENSITIES).index(name))
    began, forces = time.perf_counter(), {}
    if row == "independent draws":
        cloud = density.sample(key, num)
    elif row == "SGLD":
        cloud = chain(c, target, num, key)
    else:
        start = px.particles.uniform(key, num, jnp.zeros(2), c.start)
        cloud, forces = moved(c, samplers(c, num)[row](target), start, key)
    seconds = time.perf_counter() - began
    kept: dict[str, Any] = {"forces": forces}
    if seed == 0 and row in FIGURE_ROWS:
        kept["cloud"] = records.pack(cloud)
    yield Evaluation(evaluate(density, cloud, seed), seconds, kept)


def runs(c: Config) -> Iterator[Run]:
    """Every sampler on every density with many and with few particles."""
    settings = dataclasses.asdict(c)
    for name in ("particles", "few", "seeds", "densities", "variants"):
        settings.pop(name)
    for seed in range(c.seeds):
        for num in (c.particles, c.few):
            for name in c.densities:
                for row in ("independent draws", "SGLD", *samplers(c, num)):
                    todo = lambda a=num, b=name, d=row, e=seed: work(c, a, b, d, e)
                    yield Run({**settings, "M": num, "density": name, "sampler": row}, seed, todo)


def seen(found: list[dict]) -> dict[str, px.zoo.Density]:
    """The densities of the records."""
    return {name: DENSITIES[name] for name in dict.fromkeys(r["config"]["density"] for r in found)}


def sizes(found: list[dict]) -> list[int]:
    """The numbers of particles, largest first."""
    return sorted({r["config"]["M"] for r in found}, reverse=True)


def table(found: list[dict], num: int, density: str) -> report.Rows:
    """Mean over seeds of each measure on one density, a row per sampler; the header first."""
    here = [r for r in found if r["config"]["M"] == num and r["config"]["density"] == density]
    rows = [["sampler", "W2", "MMD²/1e-3", "KSD", "variance", "shares"]]
    for sampler in dict.fromkeys(r["config"]["sampler"] for r in here):
        metrics = [r["metrics"] for r in here if r["config"]["sampler"] == sampler]
        mean = {k: np.mean([np.asarray(m[k]) for m in metrics], axis=0) for k in metrics[0]}
        spread = f" ±{np.std([m['W2'] for m in metrics]):.3f}" if len(metrics) > 1 else ""
        cells = [f"{1000 * mean['MMD2']:.2f}", f"{mean['KSD']:.3f}", f"{mean['variance']:.2f}"]
        shares = " ".join(f"{share:.2f}" for share in mean["shares"])
        rows.append([sampler, f"{mean['W2']:.3f}{spread}", *cells, shares])
    return rows


def summary(found: list[dict], num: int) -> report.Rows:
    """W2 of every sampler (rows) on every density (columns), and its variance over the truth's."""
    tables = {density: table(found, num, density)[1:] for density in seen(found)}
    rows = [["sampler", *(f"{d}: {what}" for d in tables for what in ("W2", "variance"))]]
    for place, first in enumerate(next(iter(tables.values()))):
        cells = [cell for d in tables for cell in (tables[d][place][1], tables[d][place][4])]
        rows.append([first[0], *cells])
    return rows


def draw(found: list[dict], place: int) -> Any:
    """The clouds of the first seed: the paper's figure 1 (place 0) or its appendix figure (place 1)."""
    num = sizes(found)[place]
    here = [r for r in found if r["config"]["M"] == num and "cloud" in r]
    pick = {
        (r["config"]["sampler"], r["config"]["density"]): jnp.asarray(records.unpack(r["cloud"]))
        for r in here
    }
    clouds = {row: {name: pick[row, name] for name in seen(found)} for row in FIGURE_ROWS}
    figure = px.plots.grid(clouds, seen(found), truth=place == 0)
    figure.suptitle(f"{num} particles")
    return figure


CAPTION = (
    "Columns: U1 to U4 of Rezende and Mohamed (2015). SGLD is one chain, the others move a cloud. Variance and "
    "shares (of the modes, or of stretches of a ridge) are divided by the truth. Plain transport does not balance "
    "the drift, so w-SGLD keeps too little variance across a ridge; its calibrated form has the right one."
)

STUDY = Study(
    name="toy",
    title="Figure 1 and the appendix figure: samplers on 2-D densities, 2000 and 50 particles",
    paper="Pictures only. All five samplers cover the densities; with 50 particles w-SGLD is said to fit better.",
    takes="25 minutes",
    config=Config,
    runs=runs,
    tables={
        f"toy-{label}{ending}": Table(
            f"{name or 'all densities'}, {words}",
            (lambda found, p=place, n=name: table(found, sizes(found)[p], n))
            if name
            else (lambda found, p=place: summary(found, sizes(found)[p])),
        )
        for place, (label, words) in enumerate(
            (("2000", "many particles"), ("50", "few particles"))
        )
        for ending, name in (("", ""), *((f"-{name}", name) for name in DENSITIES))
    },
    figures={
        "toy-figure1": Figure(CAPTION, lambda found: draw(found, 0)),
        "toy-appendix": Figure(CAPTION, lambda found: draw(found, 1)),
    },
    smoke={
        "particles": 30,
        "few": 10,
        "steps": 3,
        "chain_thin": 2,
        "seeds": 1,
        "densities": ("U2",),
    },
)
