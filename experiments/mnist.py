"""Table 1: Bayesian feed-forward networks on MNIST.

python -m experiments run mnist                  # both widths, three seeds; for a GPU
python -m experiments run mnist --widths=400     # one width

Every method moves M networks. For the point estimates (SGD, with dropout, RMSprop, Adam) these do not interact: the mean of their
errors is that of single networks, and their mixture is a deep ensemble.

The paper states RMSprop with 0.99 and 5e-4, batches of 100, prior variance 1 and 100 to 150 epochs. Ours: M = 20, 100 epochs,
the rates of SGD and SGLD, gamma, and dropout, which the paper has for SGD alone; chosen with --data=validation, on 10,000 of the
training images, with one seed.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import particlax as px
from experiments import config, datasets, mnist_tables
from experiments.study import Evaluation, Run, Study, Table
from particlax import networks, predictive
from particlax.diffusions import FixedScale, Transport
from particlax.integrators import RMS, Optax


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of table 1."""

    widths: tuple[int, ...] = (400, 800)
    particles: int = 20
    epochs: int = 100
    batch: int = 100
    step_size: float = 5e-4  # of RMSprop, as in the paper; for all that do not say otherwise
    decay: float = 0.99
    sgd: float = 0.02  # SGD's rate on the mean log-likelihood, momentum 0.9
    adam: float = 5e-4
    sgld: float = 1e-3  # of RMSprop-preconditioned SGLD
    dropout: float = 0.3  # of hidden units, in the rows that say so
    input_dropout: float = 0.1
    prior: float = 1.0
    gamma: float = 0.1  # u_i v_j of the transport
    evaluations: int = 5
    seeds: int = 3
    methods: str = ""  # some of them, separated by semicolons
    data: str = (
        "mnist"  # or validation: 50,000 of its training images, tested on the others; or synthetic
    )


class Digits(NamedTuple):
    """Images as rows of numbers in [0, 1], labels, and images of clothes in the same form."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    clothes: np.ndarray


@functools.cache
def digits(source: str) -> Digits:
    """MNIST with Fashion-MNIST's test images; to choose settings `validation`; or a small `synthetic` set."""
    if source == "synthetic":
        rng = np.random.default_rng(0)
        centres = rng.uniform(size=(10, 784))
        y = rng.integers(0, 10, 600)
        x = (centres[y] + 0.3 * rng.normal(size=(600, 784))).astype(np.float32)
        other = rng.uniform(size=(50, 784)).astype(np.float32)
        return Digits(x[:500], y[:500].astype(np.int32), x[500:], y[500:].astype(np.int32), other)
    if source not in ("mnist", "validation"):
        raise SystemExit(f"--data={source}: expected mnist, validation or synthetic")
    rows = lambda images: images.reshape(len(images), -1).astype(np.float32) / 255
    seen = datasets.mnist()
    clothes, _ = datasets.mnist_part("test", name="fashion_mnist")
    if source == "validation":
        x, y = rows(seen.train_images), seen.train_labels.astype(np.int32)
        return Digits(x[:50_000], y[:50_000], x[50_000:], y[50_000:], rows(clothes))
    return Digits(
        rows(seen.train_images), seen.train_labels.astype(np.int32),
        rows(seen.test_images), seen.test_labels.astype(np.int32), rows(clothes),
    )  # fmt: skip


def start(width: int, key: jax.Array) -> list[dict[str, jax.Array]]:
    """Parameters of 784-X-X-10: He's normal weights, biases of zero."""
    sizes = (784, width, width, 10)
    layers = []
    for own, (rows, columns) in zip(
        jax.random.split(key, 3), itertools.pairwise(sizes), strict=True
    ):
        w = jax.random.normal(own, (rows, columns)) * np.sqrt(2 / rows)
        layers.append({"w": w, "b": jnp.zeros(columns)})
    return layers


def logits(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """The network."""
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def dropped(
    c: Config, layers: list, x: jax.Array, carried: Any, key: jax.Array
) -> tuple[jax.Array, Any]:
    """The network with dropout of its inputs and hidden units."""

    def drop(x: jax.Array, rate: float, place: int) -> jax.Array:
        if not rate:
            return x
        kept = jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0)

    x = drop(x, c.input_dropout, len(layers))
    for place, layer in enumerate(layers[:-1]):
        x = drop(jax.nn.relu(x @ layer["w"] + layer["b"]), c.dropout, place)
    return x @ layers[-1]["w"] + layers[-1]["b"], carried


@functools.lru_cache(maxsize=1)
def flows(c: Config, width: int, num_data: int) -> dict[str, Callable[[], px.Flow]]:
    """The rows of the table."""
    make = functools.partial(start, width)
    plain = networks.Network(make, logits)
    noisy = networks.Network(
        lambda key: (make(key), ()), lambda p, x, carried: logits(p, x),
        functools.partial(dropped, c), stateful=True,
    )  # fmt: skip
    target, random = (
        networks.classifier(net, num_data=num_data, prior=c.prior) for net in (plain, noisy)
    )
    rms = optax.rmsprop(c.step_size, decay=c.decay)
    sgd = optax.sgd(c.sgd / num_data, momentum=0.9)
    alone = lambda which, optimizer: px.Flow(which, (px.Drift(),), Optax(optimizer))
    transport = Transport(coupling=FixedScale(c.gamma))
    return {
        "SGD": lambda: alone(target, sgd),
        "SGD, dropout": lambda: alone(random, sgd),
        "RMSprop": lambda: alone(target, rms),
        "Adam": lambda: alone(target, optax.adam(c.adam)),
        "SGLD": lambda: px.sgld(target, integrator=RMS(c.sgld, decay=c.decay, epsilon=1e-8)),
        "SVGD": lambda: px.svgd(target, optimizer=rms),
        "w-SGLD": lambda: px.w_sgld(target, coupling=FixedScale(c.gamma), optimizer=rms),
        "w-SGLD-B": lambda: px.w_sgld_b(target, optimizer=rms),
        "pi-SGLD": lambda: px.pi_sgld(target, diffusion=transport, optimizer=rms),
        "RMSprop, dropout": lambda: alone(random, rms),
        "SVGD, dropout": lambda: px.svgd(random, optimizer=rms),
        "w-SGLD-B, dropout": lambda: px.w_sgld_b(random, optimizer=rms),
    }


def evaluate(particles: Any, data: Digits) -> dict[str, float]:
    """Of the mixture: error, NLL, Brier, ECE, AUROC against clothes; of single networks: mean and sd of the error."""
    seen = predictive.categorical(logits, particles, data.test_x, batch_size=2000)
    score = seen.score(data.test_y)
    assert seen.log_probs is not None
    single = np.mean(np.argmax(seen.log_probs, -1) != data.test_y, axis=1)
    far = predictive.categorical(logits, particles, data.clothes, batch_size=2000)
    return {
        "error": 100 * (1 - score.accuracy), "nll": -score.log_density, "brier": score.brier, "ece": score.ece,
        "auroc": predictive.auroc(seen.entropy().total, far.entropy().total),
        "single_error": 100 * single.mean(), "single_sd": 100 * single.std(),
        "single_nll": -float(np.mean([seen_one(seen.log_probs[m], data.test_y) for m in range(len(single))])),
    }  # fmt: skip


def together(kept: list[Any], data: Digits) -> dict[str, float]:
    """Error and NLL of the mixture over particles and over clouds kept along the way: what one chain's draws are for."""
    particles = predictive.snapshots(jax.tree.map(lambda *clouds: np.stack(clouds), *kept))
    score = predictive.categorical(logits, particles, data.test_x, batch_size=2000).score(data.test_y)  # fmt: skip
    return {"snapshots": len(kept), "snapshots_error": 100 * (1 - score.accuracy), "snapshots_nll": -score.log_density}  # fmt: skip


def seen_one(log_probs: np.ndarray, y: np.ndarray) -> float:
    """The mean log-probability of the labels under one network."""
    return float(np.mean(log_probs[np.arange(len(y)), y]))


def work(c: Config, width: int, method: str, seed: int) -> Iterator[Evaluation]:
    """One method with one seed, evaluated along the way."""
    data = digits(c.data)
    flow = flows(c, width, len(data.y))[method]()
    batches = px.Minibatches({"x": data.x, "y": data.y}, min(c.batch, len(data.y)))
    key = jax.random.key(seed)
    state = flow.init(jax.vmap(functools.partial(start, width))(jax.random.split(key, c.particles)))
    total = c.epochs * batches.batches_per_epoch
    seconds, kept = 0.0, []
    for part in range(c.evaluations):
        steps = total * (part + 1) // c.evaluations - int(state.step)
        began = time.perf_counter()
        state = px.run(flow, state, steps=steps, key=key, data=batches, progress=False).state
        jax.block_until_ready(state)
        seconds += time.perf_counter() - began
        epoch = int(state.step) / batches.batches_per_epoch
        metrics = {"epoch": epoch, **evaluate(state.particles, data)}
        if 2 * part >= c.evaluations - 1:  # the later half
            kept.append(jax.tree.map(np.asarray, state.particles))
            metrics |= together(kept, data)
        yield Evaluation(metrics, seconds)


def runs(c: Config) -> Iterator[Run]:
    """Every method with every width and seed."""
    settings = dataclasses.asdict(c)
    for name in ("widths", "seeds", "methods"):
        settings.pop(name)
    wanted = config.chosen("method", c.methods, flows(c, 1, 1))
    for width in c.widths:
        for seed in range(c.seeds):
            for method in wanted:
                todo = lambda w=width, m=method, s=seed: work(c, w, m, s)
                yield Run({"method": method, "width": width, **settings}, seed, todo)


STUDY = Study(
    name="mnist",
    title="Table 1: Bayesian feed-forward networks on MNIST",
    paper="Test error, 400-400 / 800-800: pi-SGLD 1.36 / 1.30 %, w-SGLD 1.44 / 1.37, SVGD 1.53 / 1.40, SGLD 1.64 / 1.41, RMSprop 1.59 / 1.43, "
    "SGD with dropout 1.51 / 1.33, SGD 1.72 / 1.47.",
    takes="50 minutes on an H200",
    config=Config,
    runs=runs,
    tables={
        f"mnist-{width}": Table(
            f"784-{width}-{width}-10", lambda found, w=width: mnist_tables.table(found, w)
        )
        for width in (400, 800)
    },
    smoke={
        "methods": "SGD;SGLD;pi-SGLD;w-SGLD-B, dropout",
        "widths": (400,),
        "particles": 3,
        "epochs": 2,
        "evaluations": 2,
        "seeds": 1,
        "data": "synthetic",
    },
)
