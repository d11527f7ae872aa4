"""Table 3: Bayesian LSTM language models.

python -m experiments.language prepare imdb imdb.npz      # the text as numbers, once: a minute, 34 MiB
python -m experiments.language time --corpus=imdb.npz     # ms a step of every method
python -m experiments run language --corpus=imdb.npz      # the study; for a GPU

`--corpus=` is imdb or wikitext2 (prepared when first needed), a prepared file, or a folder with train.txt, valid.txt and test.txt: one
document in a line, sentences apart by tabs, tokens by spaces. Every method moves M networks. For the point estimates (SGD, RMSprop,
Adam) these do not interact: the mean of their perplexities is that of single networks, and their mixture is a deep ensemble.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from experiments import config, language_model, language_tables, language_text, language_vectors
from experiments.fetching import DatasetError
from experiments.language_model import Shape
from experiments.language_text import Rows
from experiments.study import Evaluation, Run, Study, Table
from particlax.diffusions import FixedScale, Langevin, Transport
from particlax.integrators import RMS, Optax

OPTIONAL = ("RMSprop",)
"""Methods that run only if they are named."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of table 3."""

    corpus: str = "imdb"
    cache: str = ""
    minimum: int = 10  # of times that a word of the vocabulary is seen
    particles: int = 5
    epochs: float = 8.0
    batch: int = 256  # rows of 30 words
    length: int = 30
    embedding: int = 300
    hidden: int = 600
    dropout: float = 0.4
    vectors: bool = True  # embeddings start from vectors of the training text
    adam: float = 3e-3  # of all that do not say otherwise
    beta: float = 0.99  # Adam's memory of squares: short, for a run of a few thousand steps
    rmsprop: float = 7e-3
    sgd: float = 4.0  # SGD's rate on the mean log-likelihood of a word, momentum 0.9
    clip: float = 0.25  # of the norm of SGD's gradient, by network
    sgld: float = 2e-3  # of RMSprop-preconditioned SGLD
    floor: float = 1e-5  # what SGLD adds to the root mean square of a word's gradient
    cold: float = 1e-3  # temperature of "SGLD, cold", whose rate is RMSprop's
    warmup: float = 0.02  # share of the steps
    decay: float = 0.6  # share of the steps over which the rate falls to zero
    prior: float = 1.0
    gamma: float = 0.1  # u_i v_j of the transport
    evaluations: int = 2
    sample: int = 20_000  # rows of the evaluations along the way
    seeds: int = 1
    methods: str = ""  # some of them, separated by semicolons
    kind: str = "bfloat16"
    unroll: int = 1
    chunk: int = 0
    head: int = 2048  # most frequent words, always in the softmax's denominator while training
    samples: int = 1024  # of the other words, in place of all of them; 0 for the whole sum


_read = functools.lru_cache(maxsize=1)(language_text.read)


def text(c: Config) -> language_text.Corpus:
    """The corpus, read once."""
    return _read(c.corpus, c.cache, c.minimum)


@functools.lru_cache(maxsize=3)
def rows(c: Config, part: str) -> Rows:
    """A part of the text, packed into rows."""
    ids = text(c).parts[part]
    return language_text.packed(ids, c.length, c.length)


def shape(c: Config) -> Shape:
    """The network."""
    words = len(text(c).vocabulary)
    whole = c.samples == 0 or words <= c.head + c.samples
    head, samples = (0, 0) if whole else (c.head, c.samples)
    return Shape(words, c.embedding, c.hidden, c.kind, c.unroll, c.chunk, head, samples)


@functools.lru_cache(maxsize=1)
def shares(c: Config) -> np.ndarray:
    """How frequent the words are."""
    return language_model.log_shares(shape(c), text(c).parts["train"])


@functools.lru_cache(maxsize=1)
def embedding(c: Config) -> np.ndarray:
    """What the embeddings of all networks start from, as large as uniform numbers in [-0.1, 0.1]."""
    found = language_vectors.vectors(text(c).parts["train"], shape(c).words, c.embedding)
    return np.float32(language_model.WIDTH / np.sqrt(3)) * found


def begun(c: Config, key: jax.Array) -> Any:
    """The networks at the start."""
    make = functools.partial(language_model.start, shape(c))
    start = jax.vmap(make)(jax.random.split(key, c.particles))
    if not c.vectors:
        return start
    return start | {"embedding": jnp.broadcast_to(embedding(c), start["embedding"].shape)}


def clipped(limit: float) -> optax.GradientTransformation:
    """Shortens the gradient of each particle to `limit`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        squares = [
            jnp.sum(leaf.reshape(len(leaf), -1) ** 2, 1) for leaf in jax.tree.leaves(updates)
        ]
        scale = jnp.minimum(1, limit / jnp.sqrt(sum(squares)))
        by_particle = lambda leaf: leaf * scale.reshape(-1, *[1] * (leaf.ndim - 1))
        return jax.tree.map(by_particle, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def pace(c: Config, peak: float, steps: int) -> Callable[[Any], jax.Array]:
    """A rate that rises to its peak, stays, and falls to zero at the last step."""
    up, down = max(c.warmup * steps, 1), max(c.decay * steps, 1)
    return lambda step: (
        peak * jnp.minimum(jnp.minimum((step + 1) / up, 1), jnp.maximum(steps - step, 0) / down)
    )


@functools.lru_cache(maxsize=1)
def flows(c: Config, num: int, words: int, steps: int) -> dict[str, Callable[[], px.Flow]]:
    """The rows of the table, for `num` rows with `words` words."""
    target = language_model.target(shape(c), shares(c), c.dropout, num, c.prior)
    adam = optax.adam(pace(c, c.adam, steps), b2=c.beta)
    rms = optax.rmsprop(pace(c, c.rmsprop, steps), decay=0.99)
    sgd = optax.chain(
        clipped(c.clip * words), optax.sgd(pace(c, c.sgd / words, steps), momentum=0.9)
    )
    alone = lambda optimizer: px.Flow(target, (px.Drift(),), Optax(optimizer))
    noisy = lambda rate: RMS(pace(c, rate, steps), decay=0.99, epsilon=c.floor * words)
    cold = (px.Drift(), Langevin(c.cold))
    transport = Transport(coupling=FixedScale(c.gamma))
    return {
        "SGD": lambda: alone(sgd),
        "RMSprop": lambda: alone(rms),
        "Adam": lambda: alone(adam),
        "SGLD": lambda: px.sgld(target, integrator=noisy(c.sgld)),
        "SGLD, cold": lambda: px.Flow(target, cold, noisy(c.rmsprop)),
        "SVGD": lambda: px.svgd(target, optimizer=adam),
        "w-SGLD": lambda: px.w_sgld(target, coupling=FixedScale(c.gamma), optimizer=adam),
        "w-SGLD-B": lambda: px.w_sgld_b(target, optimizer=adam),
        "pi-SGLD": lambda: px.pi_sgld(target, diffusion=transport, optimizer=adam),
    }


def evaluate(c: Config, particles: Any, sample: int = 0) -> dict[str, float]:
    """Perplexities of the mixture and of single networks (mean and sd), on validation and test; on `sample` rows of each if given."""
    seen = {}
    for part in ("valid", "test"):
        some = Rows(*(a[: sample or None] for a in rows(c, part)))
        *single, mixture = language_model.perplexities(
            shape(c), shares(c), particles, some, c.batch
        )
        seen |= {
            part: mixture,
            f"single_{part}": np.mean(single),
            f"single_{part}_sd": np.std(single),
        }
    return seen


class Training:
    """One method on its way."""

    def __init__(self, c: Config, method: str, seed: int):
        data = rows(c, "train")
        self.batches = px.Minibatches(data._asdict(), min(c.batch, len(data.x)))
        self.steps = max(1, round(c.epochs * self.batches.batches_per_epoch))
        self.flow = flows(c, len(data.x), data.tokens, self.steps)[method]()
        self.key = jax.random.key(seed)
        self.state = self.flow.init(begun(c, self.key))
        self.seconds, self.ms = 0.0, 0.0

    def go(self, until: int) -> float:
        """Steps up to a number of them; the epoch reached."""
        steps, began = until - int(self.state.step), time.perf_counter()
        done = px.run(
            self.flow, self.state, steps=steps, key=self.key, data=self.batches, progress=False
        )
        self.state = jax.block_until_ready(done.state)
        spent = time.perf_counter() - began
        self.seconds, self.ms = self.seconds + spent, 1000 * spent / steps
        return until / self.batches.batches_per_epoch


def work(c: Config, method: str, seed: int) -> Iterator[Evaluation]:
    """One method with one seed, evaluated along the way; at last, on all of the text, where validation was best.

    It stops when two evaluations in a row are worse on validation than the best one.
    """
    run = Training(c, method, seed)
    best, kept = {"valid": np.inf, "epoch": 0.0, "place": 0}, run.state.particles
    facts: dict[str, Any] = {"corpus": language_tables.facts(text(c))}
    for place in range(1, c.evaluations + 1):
        try:
            epoch = run.go(max(run.steps * place // c.evaluations, int(run.state.step) + 1))
        except px.errors.NonFiniteError as error:
            facts["failed"] = str(error)
            break
        seen = {"epoch": epoch, "ms": run.ms, **evaluate(c, run.state.particles, c.sample)}
        yield Evaluation(seen, run.seconds)
        if seen["valid"] < best["valid"]:
            best, kept = seen | {"place": place}, jax.tree.map(jnp.copy, run.state.particles)
        if place - best["place"] >= 2:
            break
    final = {"epoch": best["epoch"], "ms": run.ms, **evaluate(c, kept)}
    yield Evaluation(final, run.seconds, facts)


def names(c: Config) -> list[str]:
    """The methods to run."""
    known = list(flows(c, 1, 1, 1))
    wanted = config.chosen("method", c.methods, known)
    return wanted if config.names(c.methods) else [name for name in known if name not in OPTIONAL]


def runs(c: Config) -> Iterator[Run]:
    """Every method with every seed."""
    settings = dataclasses.asdict(c) | {"corpus": text(c).name}
    for name in ("cache", "seeds", "methods"):
        settings.pop(name)
    for seed in range(c.seeds):
        for method in names(c):
            yield Run({"method": method, **settings}, seed, lambda m=method, s=seed: work(c, m, s))


STUDY = Study(
    name="language",
    title="Table 3: Bayesian LSTM language models",
    paper="Test perplexity on APNEWS / IMDB / BNC: pi-SGLD 59.83 / 67.04 / 92.33, w-SGLD 61.22 / 67.41 / 93.68, SVGD 61.64 / 69.25 / 94.99, "
    "SGLD 63.01 / 68.12 / 95.13, SGD 64.13 / 72.14 / 102.89.",
    takes="30 minutes on an H200",
    config=Config,
    runs=runs,
    tables={
        "language-corpora": Table("The corpora", language_tables.corpora),
        **{
            f"language-{name}": Table(title, functools.partial(language_tables.table, name=name))
            for name, title in language_tables.TITLES.items()
        },
        "language-other": Table("Perplexity, other corpora", functools.partial(language_tables.table, name="")),
    },
    smoke={
        "corpus": "synthetic", "minimum": 1, "particles": 2, "epochs": 1.0, "batch": 16, "length": 10, "embedding": 8,
        "hidden": 8, "evaluations": 2, "kind": "float32", "methods": "Adam; pi-SGLD",
    },
)  # fmt: skip


def prepare(name: str, path: str, arguments: list[str]) -> None:
    """Make the file of a corpus and say what is in it."""
    c = config.parse(Config, arguments)
    made = language_text.KNOWN.get(name)
    corpus = made(c.minimum) if made else language_text.read(name, c.cache, c.minimum)
    language_text.save(corpus, Path(path))
    size = Path(path).stat().st_size / 2**20
    print(f"{path}: {size:.1f} MiB; {language_tables.facts(corpus)}")


def clock(c: Config) -> None:
    """Print how long a step of every method takes, compiling what the study runs."""
    for method in names(c):
        run = Training(c, method, 0)
        run.go(1)
        compiled = run.seconds
        run.go(4)
        run.go(4 + max(10, min(50, int(3000 / run.ms))))
        memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
        speed = c.batch * c.length / run.ms
        print(
            f"{method}: {run.ms:.1f} ms a step, {speed:.1f} thousand words/s, first step {compiled:.0f} s, peak {memory:.1f} GiB",
            flush=True,
        )


def main(arguments: list[str]) -> None:
    """Dispatch on the first word."""
    match arguments:
        case ["prepare", name, path, *rest]:
            prepare(name, path, rest)
        case ["time", *rest]:
            clock(config.parse(Config, rest))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DatasetError as error:
        raise SystemExit(str(error)) from None
