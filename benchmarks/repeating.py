"""What it costs that a run on a GPU repeats bit for bit: a step of a program that any process compiles, over one that XLA chose by timing.

python -m experiments run repeat-time --record=study-gpu

The work of the other studies, in one compiled loop of steps each: networks as in `interaction`, CIFAR-10's and the language model's
networks (noise in place of their data), 2-D particles, logistic regression. Programs take turns, and a ratio is taken within a turn.
Each is also run twice from the same start, in this process: do the bits agree?
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import particlax as px
from benchmarks import clouds, entrants, interaction
from benchmarks import logistic as steptime
from benchmarks.beside import where
from benchmarks.timing import times
from experiments import cifar, config, covertype, language, language_text, mnist, report
from experiments.study import Evaluation, Run, Study, Table
from particlax import programs

TUNED = "chosen by timing"
PROGRAMS: dict[str, dict[str, Any]] = {
    TUNED: {},
    "chosen without timing": programs.OPTIONS[programs.ALIKE],
    "repeatable": programs.OPTIONS[programs.ORDERED],
}
"""What XLA is told."""
IN_WORDS = {"repeatable": "chosen without timing, sums in one order"}
WORDS = 30_000
Begun = tuple[px.Flow, px.State, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    works: str = ""  # some of them, separated by semicolons
    rounds: int = 7
    turn: float = 0.3  # seconds
    again: int = 20  # steps that are taken twice
    small: bool = False  # for trying it out
    seeds: int = 1


def networks(c: Config, seed: int) -> Begun:
    """Table 1's networks, by SVGD."""
    num, width, particles = (500, 16, 3) if c.small else (60_000, 400, 20)
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(num, 784)).astype(np.float32)
    batches = px.Minibatches({"x": x, "y": rng.integers(0, 10, num)}, 100)
    keys = jax.random.split(jax.random.key(seed), particles)
    flow = mnist.flows(mnist.Config(), width, num)["SVGD"]()
    return flow, flow.init(jax.vmap(functools.partial(mnist.start, width))(keys)), batches


def pictures(c: Config, seed: int) -> Begun:
    """Table 2's networks, by pi-SGLD."""
    settings = cifar.Config(data="noise")
    if c.small:
        settings = cifar.Config(data="synthetic", particles=2, widths=(8, 8, 8), dense=16, precision="float32")  # fmt: skip
    flow, state, batches, _ = cifar.begun(settings, "pi-SGLD", seed)
    return flow, state, batches


def words(c: Config, seed: int) -> Begun:
    """Table 3's networks, by SVGD."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noise.npz"
        language_text.save(noise(seed), path)
        settings = language.Config(corpus=str(path))
        if c.small:
            settings = language.Config(corpus="synthetic", minimum=1, particles=2, batch=16, length=10, embedding=8, hidden=8, kind="float32")  # fmt: skip
        training = language.Training(settings, "SVGD", seed)
    return training.flow, training.state, training.batches


def noise(seed: int) -> language_text.Corpus:
    """Sentences of 20 words, some frequent, most of them rare."""
    ids = np.minimum(np.random.default_rng(seed).zipf(1.2, 2_000_000), WORDS - 5) + 4
    ids[19::20] = language_text.EOS  # one of the four words that mark something
    parts = {name: ids.astype(np.int32) for name in language_text.PARTS}
    names = [str(i) for i in range(WORDS)]
    return language_text.Corpus("noise", names, parts, dict.fromkeys(parts, 1))


def particles(c: Config, seed: int) -> Begun:
    """2000 particles in 2-D, by SVGD."""
    flow, state = entrants.particlax_flow(clouds.work_of(clouds.Config(), 200 if c.small else 2000, seed))  # fmt: skip
    return flow, state, None


def regression(c: Config, seed: int) -> Begun:
    """Logistic regression, by SVGD."""
    work = steptime.work_of(steptime.Config(), covertype.problem("shaped", seed), seed)
    flow, state = entrants.particlax_flow(work)
    return flow, state, px.Minibatches({"x": work.x, "y": work.y}, work.batch)


WORKS: dict[str, tuple[str, Callable[[Config, int], Begun]]] = {
    "networks": ("20 networks 784-400-400-10, SVGD", networks),
    "pictures": ("10 networks for CIFAR-10, pi-SGLD", pictures),
    "words": ("5 LSTMs of 600, 30,000 words, SVGD", words),
    "particles": ("2000 particles in 2-D, SVGD", particles),
    "regression": ("100 particles, logistic regression, SVGD", regression),
}


def program(options: dict[str, Any]) -> Any:
    """So many steps in a loop, compiled as XLA is told."""

    def advance(fixed: tuple[px.Flow, Any], state: px.State, steps: jax.Array) -> px.State:
        flow, data = fixed
        key = jax.random.key(0)

        def one(_: Any, now: px.State) -> px.State:
            return flow.step(key, now, None if data is None else data.batch(key, now.step))[0]

        return jax.lax.fori_loop(0, steps, one, state)

    return eqx.filter_jit(advance, donate="all-except-first", compiler_options=options)  # pyright: ignore


def compared(c: Config, work: str, seed: int) -> Iterator[Evaluation]:
    """All programs, in turns; an evaluation for each."""
    flow, state, data = WORKS[work][1](c, seed)
    own = functools.partial(jax.tree.map, jnp.copy)
    made, same = [], []
    for options in PROGRAMS.values():
        go, fixed = program(options), (flow, data)
        ends = [go(fixed, own(state), jnp.int32(c.again)) for _ in range(2)]
        pairs = zip(*map(jax.tree.leaves, ends), strict=True)
        same.append(all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs))  # fmt: skip
        made.append(interaction.Entrant(go, fixed, own(state), c.turn))
    taken = np.array([[entrant.seconds() for entrant in made] for _ in range(c.rounds)])
    for name, steps, bits in zip(PROGRAMS, taken.T, same, strict=True):
        metrics = {"program": name, **times(steps, taken[:, 0]), "same": bits}
        yield Evaluation(metrics, float(steps.sum()), where())


def runs(c: Config) -> Iterator[Run]:
    """One pass per work and seed."""
    settings = {k: v for k, v in dataclasses.asdict(c).items() if k not in ("works", "seeds")}
    for seed in range(c.seeds):
        for work in config.chosen("work", c.works, WORKS):
            yield Run({"work": work, **settings}, seed, functools.partial(compared, c, work, seed))


def table(found: list[dict]) -> report.Rows:
    """A row for each work and program."""
    rows = [["device", "work", "program", "ms a step", "time over the one chosen by timing (deciles)", "twice from the same start: the same bits"]]  # fmt: skip
    for entry in found:
        m = entry["metrics"]
        ratio = f"{m['ratio']:.2f} ({m['ratio_low']:.2f} to {m['ratio_high']:.2f})"
        rows.append([
            entry["device"], WORKS[entry["config"]["work"]][0], IN_WORDS.get(str(m["program"]), str(m["program"])), f"{m['ms']:.3f}",
            "" if m["program"] == TUNED else ratio, "yes" if m["same"] else "no",
        ])  # fmt: skip
    return rows


STUDY = Study(
    name="repeat-time",
    title="What it costs that a run repeats bit for bit on a GPU",
    paper="",
    takes="5 minutes on an H200",
    config=Config,
    runs=runs,
    tables={"repeat-time": Table("steps of programs for the same work, in one pass", table)},
    smoke={"rounds": 2, "turn": 0.01, "small": True, "works": "particles", "again": 2},
)
