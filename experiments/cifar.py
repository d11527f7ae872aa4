"""Table 2: Bayesian convolutional networks on CIFAR-10.

python -m experiments run cifar                                                          # the study; for a GPU
python -m experiments run cifar --methods=Adam --epochs=40 --particles=4 --holdout=5000  # a quick trial
python -m experiments run cifar-time                                                     # ms a step and memory of every method

Every method moves M networks, 64-128-256 convolutions and 1024 units. For the point estimates (SGD, RMSprop, Adam) these do not
interact: the mean of their accuracies is that of single networks, and their mixture is a deep ensemble.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import particlax as px
from experiments import cifar_tables, config, datasets
from experiments.cifar_network import Shape, augmenting, network
from experiments.study import Evaluation, Run, Study, Table
from particlax import networks, predictive
from particlax.diffusions import Blob, FixedScale, Transport
from particlax.integrators import RMS, Optax

PAPER_STEPS = (5_000, 10_000)  # where the paper's rate falls tenfold


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of table 2."""

    particles: int = 10
    epochs: int = 40  # the paper's 200 take five times as long
    batch: int = 128
    schedule: str = "cosine"  # from the rate to 0; or paper: 10, 1 and 0.1 times the rate
    rate: float = 1e-3  # of Adam and RMSprop
    sgd: float = 0.05  # SGD's rate on the mean log-likelihood, momentum 0.9
    sgld: float = 1e-4  # of RMSprop-preconditioned SGLD
    optimizer: str = "adam"  # of the methods that interact; or rmsprop, sgd
    prior: str = "0.02"  # variance; by layer: "1; dense=0.1; out=0.01"
    temperature: float = 1.0
    cold: float = 1e-3  # temperature of "SGLD, cold", whose rate is Adam's
    gamma: float = 0.1  # u_i v_j of the transport
    stein: float = 1.0  # weight of pi-SGLD's interaction
    widths: tuple[int, ...] = (64, 128, 256)
    dense: int = 1024
    dropout: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4)
    momentum: float = 0.9  # of batch norm's running statistics
    activation: str = "relu"  # or silu, gelu
    crop: int = 4
    cutout: int = 0  # side of a grey square
    conv: str = "patches"  # or conv
    precision: str = "bfloat16"  # of activations; or float32
    evaluations: int = 4
    seeds: int = 2
    methods: str = ""  # some of them, separated by semicolons
    bayesian: str = ""  # layers that are particles, the others being shared: "out", or "dense; out"; all if empty
    images: int = 0  # so many training images; 0 for all
    holdout: int = (
        0  # so many training images are tested on instead of the test images: to choose settings
    )
    data: str = "cifar10"  # or synthetic; or noise, for timing


METHODS = cifar_tables.METHODS
CHOICES = {
    "schedule": ("cosine", "paper"),
    "optimizer": ("adam", "rmsprop", "sgd"),
    "activation": ("relu", "silu", "gelu"),
    "conv": ("patches", "conv"),
    "precision": ("bfloat16", "float32"),
    "data": ("cifar10", "synthetic", "noise"),
}


@functools.cache
def pictures(source: str, num: int = 0, holdout: int = 0) -> datasets.Images:
    """CIFAR-10, or a small `synthetic` set of noisy patterns for trying things out, or `noise` of CIFAR-10's size.

    The first `num` images are to train on. The last `holdout` training images stand for the test images: for choosing settings.
    """
    if source == "cifar10":
        x, y, test_x, test_y = datasets.cifar10()
    elif source == "noise":
        rng = np.random.default_rng(0)
        x, y = rng.integers(0, 256, (60_000, 32, 32, 3), np.uint8), rng.integers(0, 10, 60_000)
        x, y, test_x, test_y = x[:50_000], y[:50_000], x[50_000:], y[50_000:]
    else:
        rng = np.random.default_rng(0)
        y = rng.integers(0, 10, 400)
        x = rng.integers(0, 200, (10, 8, 8, 3))[y] + rng.integers(0, 56, (400, 8, 8, 3))
        x, y, test_x, test_y = x[:320].astype(np.uint8), y[:320], x[320:].astype(np.uint8), y[320:]
    if holdout:
        x, y, test_x, test_y = x[:-holdout], y[:-holdout], x[-holdout:], y[-holdout:]
    first = slice(num or None)
    return datasets.Images(x[first], y[first].astype(np.int32), test_x, test_y.astype(np.int32))


def variances(text: str) -> dict[str, float]:
    """The prior's variances by layer, from "1; dense=0.1": the one without a name is for all others."""
    found: dict[str, float] = {}
    for part in config.names(text):
        name, sign, value = part.rpartition("=")
        try:
            found[name.strip() if sign else ""] = float(value)
        except ValueError:
            raise config.ConfigError(
                f'--prior={text}: expected variances such as 1 or "1; dense=0.1"'
            ) from None
    return found


def checked(c: Config) -> list[str]:
    """The methods wanted; ends the program where a setting makes no sense."""
    for name, known in CHOICES.items():
        if getattr(c, name) not in known:
            raise config.ConfigError(f"--{name}={getattr(c, name)}: expected {' or '.join(known)}")
    if len(c.dropout) != len(c.widths) + 1 or not all(0 <= rate < 1 for rate in c.dropout):
        raise config.ConfigError(
            f"--dropout={config.shown(c.dropout)}: expected {len(c.widths) + 1} rates in [0, 1), one after each "
            "convolution and one after the dense layer"
        )
    if min(c.particles, c.epochs, c.batch, c.evaluations) < 1:
        raise config.ConfigError("particles, epochs, batch, evaluations: expected at least 1")
    variances(c.prior)
    return config.chosen("method", c.methods, METHODS)


def decayed(c: Config, rate: float, steps: int) -> Callable[[Any], Any]:
    """The rate at each step."""
    if c.schedule == "cosine":
        return optax.cosine_decay_schedule(rate, steps)
    return optax.piecewise_constant_schedule(10 * rate, dict.fromkeys(PAPER_STEPS, 0.1))


def shape(c: Config, side: int) -> Shape:
    """The network's part of the settings."""
    return Shape(c.widths, c.dense, c.dropout, side, c.conv, c.precision, c.momentum, c.activation)


def descent(c: Config, name: str, num_data: int, steps: int, times: float = 1.0) -> Any:
    """An optimizer; SGD's rate is multiplied, the others do not know the size of a gradient."""
    if name == "sgd":
        rate = decayed(c, times * c.sgd / num_data, steps)
        return optax.sgd(rate, momentum=0.9, nesterov=True)
    make = {"adam": optax.adam, "rmsprop": functools.partial(optax.rmsprop, decay=0.99)}[name]
    return make(decayed(c, c.rate, steps))


def flow(c: Config, method: str, num_data: int, side: int, steps: int) -> px.Flow:
    """A row of the table."""
    target = networks.classifier(
        network(shape(c, side)), num_data=num_data, prior=variances(c.prior),
        temperature=c.cold if method == "SGLD, cold" else c.temperature,
    )  # fmt: skip
    pick = functools.partial(descent, c, num_data=num_data, steps=steps)
    alone = lambda name: px.Flow(target, (px.Drift(),), Optax(pick(name)))
    transport = Transport(coupling=FixedScale(c.gamma))
    match method:
        case "SGD" | "RMSprop" | "Adam":
            return alone(method.lower())
        case "SGLD" | "SGLD, cold":
            rate = decayed(c, c.sgld if method == "SGLD" else c.rate, steps)
            return px.sgld(target, integrator=RMS(rate, epsilon=1e-8))
        case "SVGD":  # phi is about a score over M
            return px.svgd(target, optimizer=pick(c.optimizer, times=float(c.particles)))
        case "w-SGLD":
            return px.w_sgld(target, coupling=FixedScale(c.gamma), optimizer=pick(c.optimizer))
        case "w-SGLD-B":
            return px.w_sgld_b(target, optimizer=pick(c.optimizer))
    diffusion = Blob() if method == "pi-SGLD, blob" else transport
    optimizer = pick(c.optimizer)
    return px.pi_sgld(target, stein=c.stein, diffusion=diffusion, optimizer=optimizer)


def evaluate(c: Config, state: px.State, data: datasets.Images) -> dict[str, float]:
    """Of the mixture: accuracy, NLL, Brier, ECE; of single networks: accuracy and its sd, NLL, on training images too."""
    net, y = network(shape(c, data.test_images.shape[1])), data.test_labels
    seen = predictive.categorical(net, state, data.test_images)
    score, single = seen.score(y), singles(seen, y)
    some = slice(len(y))
    known = data.train_labels[some]
    fit = singles(predictive.categorical(net, state, data.train_images[some]), known)
    return {
        "accuracy": 100 * score.accuracy, "nll": -score.log_density, "brier": score.brier, "ece": score.ece,
        "single_accuracy": single[0].mean(), "single_sd": single[0].std(), "single_nll": single[1].mean(),
        "train_accuracy": fit[0].mean(), "train_nll": fit[1].mean(),
    }  # fmt: skip


def singles(seen: predictive.Categorical, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every network by itself: accuracy in percent and NLL."""
    assert seen.log_probs is not None
    right = 100 * np.mean(seen.log_probs.argmax(-1) == y, axis=1)
    return right, -seen.log_probs[:, np.arange(len(y)), y].mean(1, dtype=np.float64)


def begun(c: Config, method: str, seed: int) -> tuple[px.Flow, px.State, px.Minibatches, int]:
    """Flow, first state, data, and the number of steps of a run."""
    data = pictures(c.data, c.images, c.holdout)
    num, side = data.train_images.shape[:2]
    arrays = {"x": data.train_images, "y": data.train_labels}
    batches = px.Minibatches(arrays, min(c.batch, num), transform=augmenting(c.crop, c.cutout))
    steps = c.epochs * batches.batches_per_epoch
    moving = flow(c, method, num, side, steps)
    particles, carried = network(shape(c, side)).init(jax.random.key(seed), c.particles)
    names, shared = named(c), None
    if names:
        particles, shared = networks.split(particles, names)
    return moving, moving.init(particles, carried, shared), batches, steps


def named(c: Config) -> list[str]:
    """The layers that are particles, if not all are."""
    return config.names(c.bayesian)


def work(c: Config, method: str, seed: int) -> Iterator[Evaluation]:
    """One method with one seed, evaluated along the way; seconds are without compilation."""
    data = pictures(c.data, c.images, c.holdout)
    moving, state, batches, total = begun(c, method, seed)
    key = jax.random.key(seed)
    onward = functools.partial(px.run, moving, key=key, data=batches, progress=False)
    onward(state, steps=1)  # compiles; its result is dropped
    seconds = 0.0
    for part in range(c.evaluations):
        steps = total * (part + 1) // c.evaluations - int(state.step)
        began = time.perf_counter()
        state = jax.block_until_ready(onward(state, steps=steps).state)
        seconds += time.perf_counter() - began
        done = int(state.step)
        seen = evaluate(c, state, data)
        epoch = done / batches.batches_per_epoch
        yield Evaluation({"epoch": epoch, **seen, "ms": 1000 * seconds / done}, seconds)


def runs(c: Config) -> Iterator[Run]:
    """Every method with every seed."""
    wanted = checked(c)
    settings = dataclasses.asdict(c)
    for name in ("seeds", "methods"):
        settings.pop(name)
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    for seed in range(c.seeds):
        for method in wanted:
            todo = functools.partial(work, c, method, seed)
            yield Run({"method": method, **settings}, seed, todo)


STUDY = Study(
    name="cifar",
    title="Table 2: Bayesian convolutional networks on CIFAR-10",
    paper="Test accuracy (training loss): pi-SGLD 89.52 % (25.06), w-SGLD 88.80 (31.26), SVGD 88.72 (30.57), SGLD 88.64 (28.52), Adam 86.76 (23.80).",
    takes="20 minutes on an H200",
    config=Config,
    runs=runs,
    tables={
        "cifar": Table("CIFAR-10, 64-128-256 and 1024", cifar_tables.table),
        "cifar-epochs": Table("Accuracy of the mixture along the way, %", cifar_tables.epochs),
    },
    smoke={
        "methods": "Adam; pi-SGLD, blob",
        "particles": 2,
        "epochs": 2,
        "evaluations": 2,
        "widths": (8, 8, 8),
        "dense": 16,
        "precision": "float32",
        "data": "synthetic",
    },
)
