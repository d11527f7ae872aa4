"""particlax as an entrant of a harness that times `peers/NAME.py` by its `FAMILY`, `supports(w)` and `run(w)`.

cp benchmarks/peer.py HARNESS/peers/particlax_peer.py     # then put the name among the harness's entrants

Densities, data, starts, optimizers and clock are the harness's; `flow.step` is taken in its scan, as the other JAX packages' steps are.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

import particlax as px
from particlax.terms import Cloud, Frame

FAMILY = "jax"
EXACT = px.kernels.RBF(px.kernels.Median(subsample=None))
MODES = {
    "ensemble": lambda target, by: px.Flow(target, (px.Drift(),), px.integrators.Optax(by)),
    "sgld": lambda target, by: px.sgld(target, step_size=1e-7),
    "svgd": lambda target, by: px.svgd(target, optimizer=by, kernel=EXACT),
}


def supports(w: dict[str, Any]) -> bool:
    """Whether there is a flow for the workload."""
    return w.get("mode", "svgd") in MODES and w["kind"] != "machine"


def direction(x: jax.Array, score: jax.Array) -> jax.Array:
    """Stein's direction with the median over all pairs."""
    cloud = Cloud(x, score, jnp.int32(0), Frame(), x)
    return px.Stein(kernel=EXACT)(cloud, None, ())[0].drift


def target_of(problem: Any, size: int | None) -> px.Target:
    """The problem's log density. With data it comes summed and scaled: each datum of the batch gets an equal share."""
    if size is None:
        return px.Target(lambda theta: problem.logp(theta, ()))
    share = lambda theta, batch: jnp.full(size, problem.logp(theta, batch) / size)
    return px.Target(log_prior=lambda theta: 0.0, log_likelihood=share, num_data=size)


def run(w: dict[str, Any]) -> dict[str, Any]:
    """One workload: what the harness's other entrants return."""
    beside = lambda name: importlib.import_module(f".{name}", __package__)
    if w["kind"] == "check":
        precision, mean, x = importlib.import_module("workloads").check_problem()
        with jax.default_matmul_precision("highest"):
            phi = direction(jnp.asarray(x), -(jnp.asarray(x) - mean) @ precision)
        return beside("jax_naive").J_check(phi, "offdiag_logM")
    if w["kind"] == "bignet":
        return beside("jax_naive").run_bignet(w, direction)
    problem, key, size = beside("_jax").Problem(w), jax.random.key(0), w.get("batch")
    flow = MODES[w.get("mode", "svgd")](target_of(problem, size), problem.opt)

    def step(state: px.State, now: Any, data: Any) -> px.State:
        return flow.step(key, state, problem.batch_at(data, now) if size else None)[0]

    start = flow.init(problem.init)
    return beside("_jax").run_scanned(w, step, start, problem, lambda state: state.particles)
