"""The paper's toy study: figure 1 (2000 particles), the appendix figure (50), and a table.

python -m experiments.toy                       # both figures, one seed, the report in out/toy
python -m experiments.toy --seeds=5 --record    # the study: also pi-SGLD's variants, records in results/toy
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import particlax as px
from experiments import records, report
from experiments.config import parse
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
    seeds: int = 1
    record: bool = False
    variants: bool = False  # pi-SGLD with blob and noise too; --record implies it
    out: str = "out/toy"


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
    if c.variants or c.record:
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
    """The cloud after `steps` steps and, for the records, the root mean square of each force on it."""
    state = px.run(flow, start, steps=c.steps, key=key, progress=False).state
    forces = jax.jit(flow.step)(key, state)[1].forces if c.record else {}
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


def one_seed(c: Config, num: int, seed: int, tick: Callable[[str], None]) -> tuple[dict, list]:
    """Every sampler on every density: the clouds and their records."""
    clouds: dict[str, dict[str, jax.Array]] = {}
    found = []
    for column, (name, density) in enumerate(DENSITIES.items()):
        target = px.Target(density.log_density)
        key = jax.random.fold_in(jax.random.key(seed), column)
        start = px.particles.uniform(key, num, jnp.zeros(2), c.start)
        flows = {row: make(target) for row, make in samplers(c, num).items()}
        for row in ("independent draws", "SGLD", *flows):
            tick(f"M = {num}, seed {seed}: {row} on {name}")
            began, forces = time.perf_counter(), {}
            if row == "independent draws":
                cloud = density.sample(key, num)
            elif row == "SGLD":
                cloud = chain(c, target, num, key)
            else:
                cloud, forces = moved(c, flows[row], start, key)
            seconds = time.perf_counter() - began
            clouds.setdefault(row, {})[name] = cloud
            settings = {**dataclasses.asdict(c), "M": num, "density": name, "sampler": row}
            metrics = evaluate(density, cloud, seed)
            found.append(
                records.record("toy", settings, seed, metrics, seconds) | {"forces": forces}
            )
    return clouds, found


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
    tables = {density: table(found, num, density)[1:] for density in DENSITIES}
    rows = [["sampler", *(f"{d}: {what}" for d in DENSITIES for what in ("W2", "variance"))]]
    for place, first in enumerate(next(iter(tables.values()))):
        cells = [cell for d in DENSITIES for cell in (tables[d][place][1], tables[d][place][4])]
        rows.append([first[0], *cells])
    return rows


def figures(c: Config, clouds: dict[int, dict], out: Path) -> dict[str, Path]:
    """The paper's figure 1 and its appendix figure, as PNG."""
    paths = {}
    for num, name in ((c.particles, "figure1"), (c.few, "appendix")):
        rows = {row: clouds[num][row] for row in FIGURE_ROWS}
        figure = px.plots.grid(rows, DENSITIES, truth=num == c.particles)
        figure.suptitle(f"{num} particles")
        paths[name] = out / f"{name}.png"
        figure.savefig(paths[name], dpi=130)
    return paths


def main(c: Config) -> Path:
    """Run, draw, tabulate, and write the report."""
    matplotlib.use("Agg")
    out = Path(c.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    total = c.seeds * 2 * len(DENSITIES) * (len(samplers(c, 1)) + 2)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    found, clouds = [], {}
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)

        def tick(what: str) -> None:
            bar.update(task, description=what)
            bar.advance(task)

        for seed in range(c.seeds):
            for num in (c.particles, c.few):
                drawn, new = one_seed(c, num, seed, tick)
                found += new
                clouds.setdefault(num, drawn)
    (out / "table.json").write_text(json.dumps(found, indent=1))
    if c.record:
        records.write(records.RESULTS / "toy" / "study.jsonl", found)
    paths = figures(c, clouds, out)
    if c.record:  # the figures that README and docs show
        images = records.ROOT / "docs" / "images"
        images.mkdir(exist_ok=True)
        for name, path in paths.items():
            shutil.copy(path, images / f"toy-{name}.png")
    parts = []
    for num, name in ((c.particles, "figure1"), (c.few, "appendix")):
        parts.append(report.figure(f"{num} particles", paths[name], CAPTION))
        for density in DENSITIES:
            title = f"{density}, {num} particles, {c.seeds} seed(s)"
            report.show(console, title, table(found, num, density))
            parts.append(report.table(title, table(found, num, density)))
    page = report.page(out / "report.html", "particlax: the paper's toy densities", parts)
    console.print(f"report: {page}", soft_wrap=True)
    return page


CAPTION = (
    "Columns: U1 to U4 of Rezende and Mohamed (2015). SGLD is one chain, the others move a cloud. Variance and "
    "shares (of the modes, or of stretches of a ridge) are divided by the truth. Plain transport does not balance "
    "the drift, so w-SGLD keeps too little variance across a ridge; its calibrated form has the right one."
)


if __name__ == "__main__":
    main(parse(Config))
