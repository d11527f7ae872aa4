"""Run by tests/test_mesh.py on 8 virtual devices: prints one JSON object of what it found."""

import itertools
import json
import re
import sys
import tempfile
import warnings

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import particlax as px  # noqa: E402
from benchmarks import absent  # noqa: E402
from benchmarks.exchange import expected, in_a_step, lowered  # noqa: E402
from particlax import fused, gpu, sharding  # noqa: E402
from particlax.errors import ParticlaxError  # noqa: E402
from tests.mesh_runs import ROWS, cloud, gap, go, regression, sampler, special_runs, target  # noqa: E402

warnings.simplefilter("error")
# JAX 0.12 says so whenever it lowers one of our kernels.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
EIGHT = jax.make_mesh((8,), ("particles",))


def apart(flow, particles, mesh=EIGHT, **options):
    """The largest difference between a run on one device and one on the mesh."""
    many = go(flow, particles, mesh, **options)
    assert all(leaf.sharding.spec[0] == "particles" for leaf in jax.tree.leaves(many.particles))
    return gap(go(flow, particles, **options), many)


def samplers():
    return {name: apart(sampler(name), cloud(16, 4)) for name in px.algorithms.__all__}


def special():
    """Kernels by layer, repulsion of functions, lost particles."""
    return {name: apart(*run, **options) for name, (run, options) in special_runs().items()}


def exchanged(num, dim, names, ring=False):
    found = {}
    for name in names:
        sent = in_a_step(sampler(name), cloud(num, dim), EIGHT)
        found[name] = {
            "kinds": sorted({message.kind for message in sent}),
            "shapes": [shape for message in sent for shape in message.shapes],
            "bytes": sum(message.received(8) for message in sent),
            "formula": expected(name, num, dim, 8, ring=ring),
        }
    return found


def other_clouds():
    rows, posterior = ROWS, regression()
    start = px.particles.normal(jax.random.key(0), 8, like=jnp.zeros(3))
    both = jax.make_mesh((4, 2), ("particles", "data"))
    sinkhorn = px.w_sgld(target(), step_size=0.01, coupling=px.diffusions.Sinkhorn(), inner=2)
    ensemble = px.sgld(target(), step_size=0.01, metric=px.metrics.Ensemble())
    heat = px.svgd(target(), step_size=0.01, kernel=px.kernels.RBF(px.kernels.HeatEquation()))
    flow = px.svgd(posterior, step_size=0.01)
    found = {
        "few": apart(sampler("w_sgld_b"), cloud(16, 5001)),
        "subsample": apart(sampler("svgd"), cloud(1024, 4)),
        "sinkhorn": apart(sinkhorn, cloud(16, 4)),
        "heat": apart(heat, cloud(16, 4)),
        "ensemble": apart(ensemble, cloud(64, 4)),
        "data": apart(flow, start, both, data=px.Minibatches(rows, 10)),
        "full data": apart(flow, start, both, data=rows),
        "stream": apart(flow, start, both, data=px.Stream(rows, 10)),
    }
    sharding.GATHER_BYTES = sharding.FACTOR_BYTES = 0
    jax.clear_caches()  # the sizes are read while a step is traced
    found["ring"] = apart(sampler("w_sgld_b"), cloud(16, 4))
    found["ring sinkhorn"] = apart(sinkhorn, cloud(16, 4))
    found["parts"] = apart(ensemble, cloud(64, 4))
    return found


def stateful():
    def likelihood(w, batch, carried, key):
        return -((batch @ w) ** 2) + jax.random.normal(key) * w[0], carried + 1.0

    noisy = px.Target(
        log_prior=lambda w: 0.0, log_likelihood=likelihood, num_data=40, stateful=True
    )
    flow = px.sgld(noisy, step_size=0.001)
    state = flow.init(jnp.ones((8, 3)), jnp.zeros(8))
    return apart(flow, state, data=ROWS)


def shared():
    free, common = {"w": jnp.arange(8.0), "s": None}, {"w": None, "s": jnp.ones(2)}
    flow = px.sgld(px.Target(lambda x: -jnp.sum((x["w"] - x["s"]) ** 2)), step_size=0.01)
    return apart(flow, flow.init(free, shared=common))


def own_sharding():
    mesh = jax.make_mesh((4, 2), ("particles", "model"))
    spec = PartitionSpec("particles", None, "model")
    leaf = jax.device_put(
        jnp.ones((8, 3, 6)) * jnp.arange(8.0)[:, None, None], NamedSharding(mesh, spec)
    )
    flow = px.svgd(px.Target(lambda x: -0.5 * jnp.sum(x**2)), optimizer=optax.adam(0.01))
    one, many = go(flow, np.asarray(leaf)), go(flow, leaf, mesh)
    gap = np.max(np.abs(np.asarray(one.particles) - np.asarray(many.particles)))
    with tempfile.TemporaryDirectory() as folder:
        many = go(flow, leaf, mesh, checkpoint=folder)
        read = px.checkpoints.load(folder, flow=flow, particles=leaf).state
    pairs = list(zip(jax.tree.leaves(read), jax.tree.leaves(many.state), strict=True))
    there = all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    same = all(np.array_equal(a, b) for a, b in pairs)
    return str(many.particles.sharding.spec), float(gap), there and same


def elsewhere():
    """Particles on a device of their own, or all of them on each: resumed and read where they were."""
    flow = px.svgd(px.Target(lambda x: -0.5 * jnp.sum(x["a"] ** 2 + x["b"] ** 2)), step_size=0.01)
    mesh, found = jax.make_mesh((4, 2), ("particles", "model")), {}
    at = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    start = {"a": jnp.arange(24.0).reshape(6, 4), "b": jnp.ones((6, 4))}
    alone = jax.device_put(start, jax.devices()[5])
    everywhere = jax.device_put(start, at())
    eight = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:2] + 1]), start)
    apart = {"a": jax.device_put(eight["a"], at("particles", "model")), "b": jax.device_put(eight["b"], at("particles"))}  # fmt: skip
    for name, start, options in (("alone", alone, {}), ("everywhere", everywhere, {}), ("apart", apart, {"mesh": mesh})):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            whole = go(flow, start, steps=6, **options)
            go(flow, start, steps=3, checkpoint=folder, **options)
            resumed = go(flow, start, steps=6, checkpoint=folder, **options)
            read = px.checkpoints.load(folder, flow=flow, particles=start).state
        pairs = [(read.particles[leaf].sharding, start[leaf].sharding) for leaf in "ab"]
        found[name] = gap(whole, resumed), all(a.is_equivalent_to(b, 2) for a, b in pairs)
    flow.init(apart)
    return found


def checkpoint():
    four = jax.make_mesh((4,), ("particles",), devices=jax.devices()[:4])
    flow, start, key = sampler("svgd"), cloud(16, 4), jax.random.key(1)
    with tempfile.TemporaryDirectory() as folder:
        for steps, mesh in ((3, EIGHT), (6, four)):
            found = px.run(
                flow,
                start,
                steps=steps,
                key=key,
                progress=False,
                mesh=mesh,
                checkpoint=folder,
                every=3,
            )
    plain = px.run(flow, start, steps=6, key=key, progress=False)
    devices = len(found.particles["w"].sharding.device_set)
    return devices, float(jnp.max(jnp.abs(np.asarray(found.particles["w"]) - plain.particles["w"])))


def for_gpus():
    """The kernels in programs for eight GPUs, by sampler and way; and how far kernels, interpreted, are from one device without them."""
    kernels, flow, gather = {}, px.svgd(target(), step_size=0.01), sharding.GATHER_BYTES
    for way, name in itertools.product(("gather", "ring"), ("svgd", "w_sgld", "w_sgld_b", "pi_sgld")):  # fmt: skip
        sharding.GATHER_BYTES = gather if way == "gather" else 0
        try:
            with absent.tracing():
                text = lowered(sampler(name), cloud(1 << 14, 3), EIGHT, platform="cuda").as_text()
        except RuntimeError as error:  # this JAX lowers for GPUs only where one is
            kernels[f"{name}, {way}"] = str(error)
            continue
        kernels[f"{name}, {way}"] = sorted(set(re.findall(r'name = "(_\w+)"', text)))
    start, least = cloud(256, 3), fused.LEAST
    one, gpu.MODE, fused.LEAST = go(flow, start, steps=2), "interpret", 1
    gaps = {}
    for way, room in (("gather", gather), ("ring", 0)):
        sharding.GATHER_BYTES = room
        gaps[way] = gap(one, go(flow, start, EIGHT, steps=2))
    sharding.GATHER_BYTES, gpu.MODE, fused.LEAST = gather, None, least
    return kernels, gaps


def refused():
    lines = []
    wrong = jax.make_mesh((8,), ("x",))
    for num, mesh in ((10, EIGHT), (8, wrong), (8, "eight")):
        try:
            go(sampler("sgld"), cloud(num, 4), mesh)
        except ParticlaxError as error:
            lines.append(str(error))
    return lines


if __name__ == "__main__":
    names = [name for name in px.algorithms.__all__ if name != "calibrated"]
    found = {
        "single": samplers(),
        "gather": exchanged(1024, 4, px.algorithms.__all__),
        "turned": exchanged(16, 5000, names),
        "special": special(),
        "stateful": stateful(),
        "shared": shared(),
        "own": own_sharding(),
        "elsewhere": elsewhere(),
        "checkpoint": checkpoint(),
        "refused": refused(),
        "gpus": for_gpus(),
    }
    with jax.enable_x64(True):
        found["double"] = samplers()
    found["others"] = other_clouds()
    found["ring"] = exchanged(1024, 4, px.algorithms.__all__, ring=True)
    json.dump(found, sys.stdout)
