"""SVGD in several packages, each in the fastest form that its interface allows: a logistic regression, or a normal without data.

Same density, data, starting particles and Adagrad for all; each has its package's own rule for the bandwidth, a median over all pairs.
`px.run` gathers random rows as a user would; all others cut batches from the shuffled rows, which is cheaper. The
packages of others see one array of particles, [M, D] with log alpha last, which is no dearer for them than a dict.
"""

import functools
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import particlax as px
from experiments import covertype

FIRST_SQUARE = 0.1
"""What Adagrad's sum of squares begins with, optax's default."""
EPSILON = 1e-7


class Work(NamedTuple):
    """What every entrant is given."""

    x: np.ndarray
    """Rows, shuffled; none for the standard normal."""
    y: np.ndarray
    start: np.ndarray
    """Particles [M, D]; in the regression weights, then log alpha."""
    batch: int
    rate: float
    """Adagrad's."""

    def rows(self, step: int) -> slice:
        """The batch of a step: the rows in their order, again and again."""
        begin = step % max(1, len(self.y) // self.batch) * self.batch
        return slice(begin, begin + self.batch)

    def save(self, path: Path) -> None:
        """Write it for the workers."""
        np.savez(path, **self._asdict())  # pyright: ignore

    @classmethod
    def load(cls, path: Path) -> "Work":
        """What `save` wrote."""
        with np.load(path) as found:
            parts = dict(found)
        return cls(**{**parts, "batch": int(parts["batch"]), "rate": float(parts["rate"])})


class Sampler(NamedTuple):
    """A sampler on its way: `advance(steps)` returns when the steps are done."""

    advance: Callable[[int], None]
    particles: Callable[[], np.ndarray]
    """As `Work.start`."""


class Entrant(NamedTuple):
    """A package, how it is used, and what to install for it."""

    prepare: Callable[[Work], Sampler]
    notes: str
    packages: tuple[str, ...] = ()
    """Imported before the clock starts."""
    install: str = ""
    anywhere: bool = True
    """Whether it runs on a GPU as well."""


# ------------------------------------------------------------------------------------------------- JAX


def tree(theta: Any) -> dict[str, Any]:
    """Columns as the parameters of `covertype`."""
    return {"w": theta[..., :-1], "log_alpha": theta[..., -1]}


def matrix(particles: Any) -> np.ndarray:
    """The parameters of `covertype` as columns; a matrix as it is."""
    if not isinstance(particles, dict):
        return np.asarray(particles)
    return np.concatenate([particles["w"], particles["log_alpha"][:, None]], 1)


def normal(theta: jax.Array) -> jax.Array:
    """The log density where there are no data."""
    return -0.5 * jnp.sum(theta**2)


def density(work: Work) -> Callable[[jax.Array, Any], jax.Array]:
    """The log density at one row of particles."""
    if not len(work.y):
        return lambda theta, batch: normal(theta)
    target = covertype.target(len(work.y))
    return lambda theta, batch: target(tree(theta), batch)


def scanned(
    work: Work, state: Any, step: Callable[[Any, Any], Any], particles: Callable[[Any], Any]
) -> Sampler:
    """A JAX step inside a jitted scan, its state donated."""
    data = {"x": jnp.asarray(work.x), "y": jnp.asarray(work.y)}
    state, done = jax.tree.map(jnp.array, state), 0

    @functools.partial(jax.jit, static_argnames="steps", donate_argnames="state")
    def scan(state: Any, data: Any, first: int, steps: int) -> Any:
        def body(state: Any, now: jax.Array) -> tuple[Any, None]:
            if not len(work.y):
                return step(state, None), None
            begin = work.rows(now).start  # pyright: ignore
            batch = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, begin, work.batch), data)
            return step(state, batch), None

        return lax.scan(body, state, first + jnp.arange(steps))[0]

    def advance(steps: int) -> None:
        nonlocal state, done
        state = jax.block_until_ready(scan(state, data, done, steps))
        done += steps

    return Sampler(advance, lambda: np.asarray(particles(state)))


def particlax_flow(work: Work) -> tuple[px.Flow, px.State]:
    """The flow and its start."""
    target, start = px.Target(normal), jnp.asarray(work.start)
    if len(work.y):
        target, start = covertype.target(len(work.y)), tree(start)
    exact = px.kernels.RBF(px.kernels.Median(subsample=None))
    flow = px.svgd(target, optimizer=optax.adagrad(work.rate), kernel=exact)
    return flow, flow.init(start)


def particlax_run(work: Work) -> Sampler:
    """`px.run` as a user would write it; every call goes on from the state of the last."""
    flow, state = particlax_flow(work)
    data = px.Minibatches({"x": work.x, "y": work.y}, work.batch) if len(work.y) else None
    key = jax.random.key(0)

    def advance(steps: int) -> None:
        nonlocal state
        result = px.run(flow, state, steps=steps, key=key, data=data, progress=False)
        state = jax.block_until_ready(result.state)

    return Sampler(advance, lambda: matrix(state.particles))


def particlax_scan(work: Work) -> Sampler:
    """`flow.step` in a loop of one's own."""
    flow, start = particlax_flow(work)
    key = jax.random.key(0)
    step = lambda state, batch: flow.step(key, state, batch)[0]
    return scanned(work, start, step, lambda state: matrix(state.particles))


def blackjax_svgd(work: Work) -> Sampler:
    """`blackjax.svgd`; the median rule is applied to the start too, where its default is a length scale of 1."""
    blackjax, module = import_module("blackjax"), import_module("blackjax.vi.svgd")
    svgd = blackjax.svgd(jax.grad(density(work)), optax.adagrad(work.rate))
    first = svgd.init(jnp.asarray(work.start), {"length_scale": jnp.ones(())})
    step = lambda state, batch: svgd.step(state, batch=batch)
    return scanned(work, module.update_median_heuristic(first), step, lambda s: s.particles)


def numpyro_svgd(work: Work) -> Sampler:
    """`SVGD.update` of NumPyro's einstein: its `run` takes no minibatches."""
    numpyro, dist = import_module("numpyro"), import_module("numpyro.distributions")
    einstein, optim = import_module("numpyro.contrib.einstein"), import_module("numpyro.optim")
    log_density = density(work)

    def model(batch: Any) -> None:
        flat = dist.Normal(0.0, 1.0).expand(work.start.shape[1:]).to_event(1).mask(False)
        theta = numpyro.sample("theta", flat)
        numpyro.factor("log density", log_density(theta, batch))

    adagrad = optim.optax_to_numpyro(optax.adagrad(work.rate))
    svgd = einstein.SVGD(model, adagrad, einstein.RBFKernel(), num_stein_particles=len(work.start))
    some = work.rows(0)
    first = svgd.init(jax.random.key(0), {"x": work.x[some], "y": work.y[some]})
    start = svgd.optim.init({"theta_auto_loc": jnp.asarray(work.start)})
    step = lambda state, batch: svgd.update(state, batch)[0]
    particles = lambda state: svgd.get_params(state)["theta_auto_loc"]
    return scanned(work, first._replace(optim_state=start), step, particles)


# ----------------------------------------------------------------------------------------------- others


def pyro_svgd(work: Work) -> Sampler:
    """`pyro.infer.SVGD` in its multivariate mode, Liu and Wang's; one Python step at a time."""
    torch, pyro = import_module("torch"), import_module("pyro")
    dist, infer = import_module("pyro.distributions"), import_module("pyro.infer")
    num, (count, dim) = len(work.y), work.start.shape
    x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
    zero, one = torch.zeros(dim), torch.ones(dim)

    def model(x: Any, y: Any) -> None:
        theta = pyro.sample("theta", dist.Normal(zero, one).to_event(1).mask(False))
        if not num:
            pyro.factor("log density", -0.5 * (theta * theta).sum(-1))
            return
        w, log_alpha = theta[..., :-1], theta[..., -1]
        alpha, logit = log_alpha.exp(), w @ x.T
        prior = (0.5 * w.shape[-1] + covertype.SHAPE) * log_alpha
        prior = prior - alpha * (0.5 * (w * w).sum(-1) + covertype.RATE)
        rows = y * logit - torch.nn.functional.softplus(logit)
        pyro.factor("log density", prior + num / len(y) * rows.sum(-1))

    pyro.clear_param_store()
    pyro.enable_validation(False)
    options = {"lr": work.rate, "initial_accumulator_value": FIRST_SQUARE, "eps": EPSILON}
    kernel, adagrad = infer.RBFSteinKernel(), pyro.optim.Adagrad(options)
    svgd = infer.SVGD(model, kernel, adagrad, count, max_plate_nesting=0, mode="multivariate")
    with torch.no_grad():  # makes the particles, which are then put where all begin
        svgd.guide(x[work.rows(0)], y[work.rows(0)])
        cloud = pyro.param("svgd_particles")
        cloud.copy_(torch.from_numpy(work.start).reshape(cloud.shape))
    done = 0

    def advance(steps: int) -> None:
        nonlocal done
        for now in range(done, done + steps):
            rows = work.rows(now)
            svgd.step(x[rows], y[rows])
        done += steps

    return Sampler(advance, lambda: cloud.detach().reshape(count, dim).numpy().copy())


def numpy_score(theta: np.ndarray, x: np.ndarray, y: np.ndarray, num: int) -> np.ndarray:
    """The gradient of the log posterior at every particle, by hand."""
    w, alpha = theta[:, :-1], np.exp(theta[:, -1:])
    miss = y - (0.5 + 0.5 * np.tanh(0.5 * (w @ x.T)))
    score = np.empty_like(theta)
    score[:, :-1] = (num / len(y)) * (miss @ x) - alpha * w
    size = 0.5 * np.einsum("md,md->m", w, w) + covertype.RATE
    score[:, -1] = 0.5 * w.shape[1] + covertype.SHAPE - alpha[:, 0] * size
    return score


def numpy_direction(theta: np.ndarray, score: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Liu and Wang's direction with two products of matrices; `pairs` are the distinct ones, as flat indices."""
    gram = theta @ theta.T
    norm = np.diagonal(gram)
    r2 = norm[:, None] + norm - 2 * gram
    inverse = math.log(len(theta)) / np.median(
        r2.take(pairs)
    )  # 1 / h; np.log would make all float64
    kernel = np.exp(np.minimum(-inverse * r2, 0))
    pull = kernel @ (score - 2 * inverse * theta)
    return (pull + 2 * inverse * kernel.sum(1, keepdims=True) * theta) / len(theta)


def numpy_loop(work: Work) -> Sampler:
    """A plain loop over vectorised NumPy in float32."""
    theta, squares, done = work.start.copy(), np.full_like(work.start, FIRST_SQUARE), 0
    above, right = np.triu_indices(len(theta), 1)
    pairs = above * len(theta) + right

    def advance(steps: int) -> None:
        nonlocal theta, squares, done
        for now in range(done, done + steps):
            rows = work.rows(now)
            score = -theta
            if len(work.y):
                score = numpy_score(theta, work.x[rows], work.y[rows], len(work.y))
            move = numpy_direction(theta, score, pairs)
            squares += move * move
            theta += work.rate * move / np.sqrt(squares + EPSILON)
        done += steps

    return Sampler(advance, theta.copy)


OURS = "particlax"
ENTRANTS: dict[str, Entrant] = {
    OURS: Entrant(particlax_run, "px.run", ("particlax", "jax")),
    "particlax (lax.scan)": Entrant(
        particlax_scan, "flow.step in a jitted lax.scan", ("particlax", "jax")
    ),
    "BlackJAX": Entrant(
        blackjax_svgd,
        "svgd.step in a jitted lax.scan",
        ("blackjax", "blackjax.vi.svgd"),
        "pip install blackjax",
    ),
    "NumPyro": Entrant(
        numpyro_svgd,
        "SVGD.update in a jitted lax.scan",
        ("numpyro", "numpyro.contrib.einstein"),
        "pip install numpyro",
    ),
    "Pyro": Entrant(
        pyro_svgd,
        "SVGD.step, multivariate",
        ("pyro", "torch", "pyro.infer"),
        "pip install torch==2.13.0 pyro-ppl",
        anywhere=False,
    ),
    "NumPy": Entrant(numpy_loop, "plain loop, float32", ("numpy",), anywhere=False),
}
