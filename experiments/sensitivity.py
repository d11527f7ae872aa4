"""Figure 3: how pi-SGLD's accuracy depends on gamma, the scale of its transport, and on the number of particles M.

python -m experiments run sensitivity

Two sizes of training set: all rows, as in the paper, and 2000, where the posterior is wide enough for particles to differ.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from experiments import covertype, report
from experiments.study import Evaluation, Figure, Run, Study, Table
from particlax.diffusions import FixedScale, Transport
from particlax.kernels import RBF, Median


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of figure 3."""

    gammas: tuple[float, ...] = (0.0, 1.0, 1e2, 1e4, 1e5, 1e6, 1e7)  # u_i v_j, times M
    particles: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200)
    rows: tuple[int, ...] = (0, 2000)  # training rows; 0 is all
    batch: int = 50
    steps: int = 3000
    adagrad: float = 2.0
    seeds: int = 5
    data: str = "covertype"


@functools.lru_cache(maxsize=1)
def flow(c: Config, gamma: float, num: int, num_data: int) -> px.Flow:
    """pi-SGLD as in the paper. One particle has no distances to take a median of; any bandwidth does."""
    width = 1.0 if num == 1 else Median()
    diffusion = Transport(coupling=FixedScale(gamma / num, lam=width))
    target = covertype.target(num_data)
    return px.pi_sgld(
        target, diffusion=diffusion, kernel=RBF(bandwidth=width), optimizer=optax.adagrad(c.adagrad)
    )


def work(c: Config, gamma: float, num: int, rows: int, seed: int) -> Iterator[Evaluation]:
    """One setting on one split; start and minibatches are those of every other gamma."""
    began = time.perf_counter()
    split = covertype.problem(c.data, seed, rows)
    key = jax.random.key(seed)
    result = px.run(
        flow(c, gamma, num, split.num_data),
        covertype.start(key, num, split.dim),
        steps=c.steps,
        key=key,
        data=px.Minibatches(split.train, c.batch),
        progress=False,
    )
    w = jnp.asarray(result.particles["w"])
    seen = {**covertype.predict(w, split.test), "spread": jnp.mean(jnp.std(w, 0))}
    yield Evaluation(seen, time.perf_counter() - began)


def runs(c: Config) -> Iterator[Run]:
    """Every gamma with every number of particles; the seed innermost, so that each flow is compiled once."""
    common = {"batch": c.batch, "steps": c.steps, "adagrad": c.adagrad, "data": c.data}
    for rows in c.rows:
        for num in c.particles:
            for gamma in c.gammas if num > 1 else (0.0,):  # one particle has nobody to repel
                for seed in range(c.seeds):
                    settings = {"rows": rows, "M": num, "gamma": gamma, **common}
                    todo = lambda g=gamma, n=num, r=rows, s=seed: work(c, g, n, r, s)
                    yield Run(settings, seed, todo)


def cell(found: list[dict], rows: int, num: int, gamma: float, key: str) -> np.ndarray:
    """The values of one setting, by seed; one particle has the same for every gamma."""
    gamma = 0.0 if num == 1 else gamma
    here = [
        r for r in found
        if (r["config"]["rows"], r["config"]["M"], r["config"]["gamma"]) == (rows, num, gamma)
    ]  # fmt: skip
    return np.array([r["metrics"][key] for r in sorted(here, key=lambda r: r["seed"])])


def axes(found: list[dict]) -> tuple[list[int], list[int], list[float]]:
    """Training rows, numbers of particles and gammas of the records."""
    rows, nums, gammas = (
        sorted({r["config"][name] for r in found}) for name in ("rows", "M", "gamma")
    )
    return rows, nums, gammas


def table(found: list[dict], place: int, key: str) -> report.Rows:
    """Mean and standard deviation over splits, M by gamma, for one size of the training set."""
    every, nums, gammas = axes(found)
    lines = [["M", *(f"gamma {gamma:g}" for gamma in gammas), "best gamma over gamma 0"]]
    scale, digits = (100, 2) if key == "accuracy" else (1, 3)
    for num in nums:
        cells = {g: scale * cell(found, every[place], num, g, key) for g in gammas}
        best = max(gammas, key=lambda g: cells[g].mean())
        gain = cells[best] - cells[0.0]
        error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
        said = f"{best:g}: {gain.mean():+.{digits}f} ±{error:.{digits}f}" if num > 1 else "-"
        lines.append([
            str(num), *(f"{v.mean():.{digits}f} ±{v.std():.{digits}f}" for v in cells.values()), said
        ])  # fmt: skip
    return lines


CAPTION = (
    "Test accuracy of pi-SGLD (top) and log-likelihood (bottom) against gamma, a line for each number of particles; means and "
    "standard deviations over five splits. Left: all training rows, as in the paper's figure 3; right: 2000 training rows. "
    "The same starts and minibatches for every gamma. Two particles with a large gamma fly apart and leave the picture."
)


ROOM = {"accuracy": 0.13, "log_likelihood": 0.15}
"""How far below the best value the figure reaches."""


def draw(found: list[dict]) -> Any:
    """Accuracy and log-likelihood (rows) for each size of the training set (columns)."""
    every, nums, gammas = axes(found)
    figure, panels = report.panels(2, len(every), (11, 8), sharex=True, sharey="row")
    import matplotlib  # noqa: PLC0415

    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(nums)))
    places = np.arange(len(gammas))
    for row, key, label in zip(
        panels,
        ("accuracy", "log_likelihood"),
        ("test accuracy", "test log-likelihood"),
        strict=True,
    ):
        for axis, rows in zip(row, every, strict=True):
            for shift, (num, shade) in enumerate(zip(nums, shades, strict=True)):
                values = [cell(found, rows, num, gamma, key) for gamma in gammas]
                axis.errorbar(
                    places + 0.04 * (shift - len(nums) / 2), [v.mean() for v in values],
                    [v.std() for v in values], color=shade, lw=1.3, marker="o", ms=3, label=f"M = {num}",
                )  # fmt: skip
            axis.set_title(f"{rows} training rows" if rows else "all training rows", fontsize=10)
            axis.set_xticks(places, [f"{gamma:g}" for gamma in gammas])
        row[0].set_ylabel(label)
        tops = [cell(found, r, n, g, key).mean() for r in every for n in nums for g in gammas]
        row[0].set_ylim(max(tops) - ROOM[key], max(tops) + 0.1 * ROOM[key])
    for axis in panels[1]:
        axis.set_xlabel("gamma M")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False, fontsize=9)
    return figure


STUDY = Study(
    name="sensitivity",
    title="Figure 3: pi-SGLD's sensitivity to gamma and the number of particles",
    paper="A figure without numbers: the best accuracy is reached with an appropriate scale of the transport; it keeps improving "
    "with more particles; the transport is more important when particles are few.",
    takes="9 minutes",
    config=Config,
    runs=runs,
    tables={
        f"sensitivity-{label}{ending}": Table(
            f"test {words}, {size} training rows",
            lambda found, p=place, k=key: table(found, p, k),
        )
        for place, (label, size) in enumerate((("all", "all"), ("few", "few")))
        for ending, key, words in (
            ("", "accuracy", "accuracy, %"),
            ("-ll", "log_likelihood", "log-likelihood"),
        )
    },
    figures={"sensitivity": Figure(CAPTION, draw)},
    smoke={
        "gammas": (0.0, 1.0),
        "particles": (1, 3),
        "rows": (0, 100),
        "steps": 20,
        "seeds": 2,
        "data": "synthetic",
    },
)
