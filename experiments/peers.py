"""Samplers of other packages, to be measured beside ours on `posteriors`. Each has its own defaults.

Only SVGD has none for its optimizer: NumPyro shows Adagrad(0.05), whose particles do not arrive here in
2000 steps, so both packages get Adagrad(0.5), the best of a few tried. Every peer is one jitted program.

pip install numpyro blackjax    # particlax itself needs neither
"""

import dataclasses
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.posteriors import Tree

CHAINS, WARMUP, DRAWS = 4, 1000, 1000  # of NUTS
PARTICLES, STEPS = 100, 2000  # of both SVGDs
SVI_STEPS, SVI_DRAWS = 50_000, 4000  # with 10 000 steps sblrc is still far off


class Density(Protocol):
    """What a peer needs to know of a posterior."""

    @property
    def log_density(self) -> Callable[[Any], Any]:
        """Of one tree of unconstrained parameters."""
        ...

    @property
    def point(self) -> Tree:
        """A tree of the parameters' shapes, where the search begins."""
        ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """The least that is a `Density`."""

    log_density: Callable[[Any], Any]
    point: Tree


class Outcome(NamedTuple):
    """What a peer returned and what it cost."""

    draws: Tree
    """Every draw of every chain on a leading axis, in unconstrained coordinates."""
    gradients: int
    """Gradients of the log density, over all chains or particles and with the warm-up."""
    seconds: float
    """Wall time, with compilation."""
    notes: str


def package(name: str) -> Any:
    """A module of an optional package."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SystemExit(f"{name} is missing: pip install numpyro blackjax") from error


def outcome(draws: Tree, gradients: int, began: float, notes: str) -> Outcome:
    """Stop the clock and say how many draws are not finite."""
    draws = jax.block_until_ready(draws)
    seconds = time.perf_counter() - began
    leaves = [jnp.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in jax.tree.leaves(draws)]
    lost = int(jnp.sum(~jnp.stack(leaves).all(0)))
    if lost:
        notes += f"; diverged: {lost} of {len(leaves[0])} draws are not finite"
    return Outcome(draws, gradients, seconds, notes)


def around(point: Tree, key: jax.Array, num: int, draw: Callable) -> Tree:
    """`num` points: `point` plus `draw(key, shape)`, leaf by leaf."""
    leaves, shape = jax.tree.flatten(point)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        shape, [x + draw(k, (num, *x.shape)) for k, x in zip(keys, leaves, strict=True)]
    )


def sites(posterior: Density) -> tuple[Callable[[], None], Callable[[dict], Tree]]:
    """A NumPyro model with one flat site per leaf and the density as a factor; its sites as a tree."""
    numpyro, dist = package("numpyro"), package("numpyro.distributions")
    leaves, shape = jax.tree.flatten(posterior.point)
    names = [f"x{place}" for place in range(len(leaves))]

    def model() -> None:
        values = {}
        for name, leaf in zip(names, leaves, strict=True):
            # Flat, and unlike ImproperUniform it can be sampled, which SVGD does to trace the model.
            flat = dist.Normal(0.0, 1.0).expand(leaf.shape).to_event(leaf.ndim).mask(False)
            values[name] = numpyro.sample(name, flat)
        numpyro.factor("log density", posterior.log_density(tree(values)))

    def tree(values: dict) -> Tree:
        return jax.tree.unflatten(shape, [values[name] for name in names])

    return model, tree


def nuts(posterior: Density, seed: int, *, dense: bool = False) -> Outcome:
    """NumPyro's NUTS: four chains from uniform(-2, 2), a thousand draws each after as many to warm up.

    `dense` gives it a full mass matrix, which is not its default.
    """
    infer, diagnostics = package("numpyro.infer"), package("numpyro.diagnostics")
    began = time.perf_counter()
    wide = lambda key, shape: jax.random.uniform(key, shape, minval=-2.0, maxval=2.0)
    total = WARMUP + DRAWS

    @jax.jit
    def run(key: jax.Array) -> tuple[Tree, dict]:
        first, rest = jax.random.split(key)
        kernel = infer.NUTS(potential_fn=lambda p: -posterior.log_density(p), dense_mass=dense)
        settings = {"num_warmup": WARMUP, "num_samples": DRAWS, "num_chains": CHAINS}
        mcmc = infer.MCMC(kernel, **settings, chain_method="vectorized", progress_bar=False)
        # As `warmup(collect_warmup=True)` does, but for all of the run: the warm-up's steps count too.
        mcmc._set_collection_params(0, total, total)
        start = around(posterior.point, first, CHAINS, wide)
        mcmc.run(rest, init_params=start, extra_fields=("num_steps",))
        after = jax.tree.map(lambda x: x[:, WARMUP:], mcmc.get_samples(group_by_chain=True))
        draws = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), after)
        return draws, mcmc.get_extra_fields(group_by_chain=True)

    draws, fields = run(jax.random.key(seed))
    gradients = CHAINS + int(fields["num_steps"].sum())  # at the start, then one per leapfrog step
    broken = int(fields["diverging"][:, WARMUP:].sum())
    found = outcome(draws, gradients, began, f"{CHAINS} chains of {WARMUP} + {DRAWS}")
    chains = [np.asarray(x).reshape(CHAINS, DRAWS, -1) for x in jax.tree.leaves(draws)]
    worst = max(np.max(diagnostics.split_gelman_rubin(x)) for x in chains)
    notes = f"{found.notes}; {broken} divergences after the warm-up, R-hat up to {worst:.3g}"
    return found._replace(notes=notes)


def numpyro_svgd(posterior: Density, seed: int, step_size: float = 0.5) -> Outcome:
    """NumPyro's SVGD: a hundred particles from uniform(-2, 2), Adagrad, its RBF kernel."""
    einstein, optim = package("numpyro.contrib.einstein"), package("numpyro.optim")
    began = time.perf_counter()
    model, tree = sites(posterior)
    kernel, adagrad = einstein.RBFKernel(), optim.Adagrad(step_size)

    @jax.jit
    def run(key: jax.Array) -> Tree:
        svgd = einstein.SVGD(model, adagrad, kernel, num_stein_particles=PARTICLES)
        params = svgd.run(key, STEPS, progress_bar=False).params
        return tree({name.removesuffix("_auto_loc"): x for name, x in params.items()})

    notes = f"{PARTICLES} particles, {STEPS} steps of Adagrad({step_size})"
    return outcome(run(jax.random.key(seed)), PARTICLES * STEPS, began, notes)


def blackjax_svgd(posterior: Density, seed: int, step_size: float = 0.5) -> Outcome:
    """BlackJAX's SVGD: a hundred particles from N(0, I), Adagrad, its RBF kernel with the median heuristic."""
    blackjax = package("blackjax")
    began = time.perf_counter()
    svgd = blackjax.svgd(jax.grad(posterior.log_density), optax.adagrad(step_size))
    start = around(posterior.point, jax.random.key(seed), PARTICLES, jax.random.normal)

    @jax.jit
    def run(particles: Tree) -> Tree:
        first = svgd.init(particles, {"length_scale": jnp.ones(())})
        step = lambda state, _: (svgd.step(state), None)
        return jax.lax.scan(step, first, length=STEPS)[0].particles

    notes = f"{PARTICLES} particles, {STEPS} steps of Adagrad({step_size})"
    return outcome(run(start), PARTICLES * STEPS, began, notes)


def autonormal(posterior: Density, seed: int, step_size: float = 0.01) -> Outcome:
    """NumPyro's AutoNormal: an independent Gaussian per coordinate, fitted by SVI with Adam."""
    infer, optim = package("numpyro.infer"), package("numpyro.optim")
    began = time.perf_counter()
    model, tree = sites(posterior)
    normal = package("numpyro.infer.autoguide").AutoNormal

    @jax.jit
    def run(key: jax.Array) -> Tree:
        fit, draw = jax.random.split(key)
        guide = normal(model)
        svi = infer.SVI(model, guide, optim.Adam(step_size), infer.Trace_ELBO())
        params = svi.run(fit, SVI_STEPS, progress_bar=False).params
        return tree(guide.sample_posterior(draw, params, sample_shape=(SVI_DRAWS,)))

    notes = f"{SVI_STEPS} steps of Adam({step_size}), {SVI_DRAWS} draws of the fit"
    return outcome(run(jax.random.key(seed)), SVI_STEPS, began, notes)


PEERS: dict[str, Callable[..., Outcome]] = {
    "NumPyro NUTS": nuts,
    "NumPyro SVGD": numpyro_svgd,
    "BlackJAX SVGD": blackjax_svgd,
    "NumPyro AutoNormal": autonormal,
}
