"""Speed guarded by counting: temporary memory of the compiled programs of the main paths, and traces of the density.

Programs are compiled for shapes and never run. Limits are what the algorithm needs: strips of the matrix of pairs that stay in
cache, and of a large cloud no copies beside its gradient and its forces.
"""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import particlax as px
from benchmarks import lowered
from benchmarks.compiling import SAMPLERS
from experiments import mnist
from particlax import medians, pairwise, skinny
from particlax.diffusions import GFSD, Blob, FixedScale, Sinkhorn, Transport
from particlax.terms import Cloud, Frame

RBF = px.kernels.RBF(bandwidth=1.0)
TERMS = {
    "Stein": px.Stein(kernel=RBF),
    "Blob": Blob(kernel=RBF),
    "GFSD": GFSD(kernel=RBF),
    "Transport": Transport(coupling=FixedScale(lam=1.0)),
    "Sinkhorn": Transport(coupling=Sinkhorn(lam=1.0)),
}
STRIP = 4 * pairwise.STRIP_ELEMENTS["cpu"]


def cloud(num, dim):
    return jax.ShapeDtypeStruct((num, dim), jnp.float32)


def temporary(function, *args, donate=()):
    """Bytes that the compiled function needs beside its arguments and results."""
    compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def velocity(term, x, score):
    return term(Cloud(x, score, jnp.int32(0), Frame(), x), None, term.init(x))[0].drift


@pytest.mark.parametrize("name", TERMS)
def test_many_particles_need_strips(name):
    """Two at most (Stein: K and its slope), and some vectors; all pairs would be 64 MB."""
    num, strips = 4000, 2 if name == "Stein" else 1
    used = temporary(functools.partial(velocity, TERMS[name]), cloud(num, 2), cloud(num, 2))
    assert used < strips * STRIP + 40 * 4 * num


def test_strips_do_not_grow_with_the_cloud():
    used = [temporary(functools.partial(velocity, TERMS["Blob"]), *[cloud(n, 2)] * 2) for n in (4000, 16000)]  # fmt: skip
    assert used[1] - used[0] < 40 * 4 * 12000


def test_the_exact_median_needs_vectors():
    assert temporary(medians.median_sqdist, cloud(4000, 2)) < 64 * 4 * 4000


@pytest.mark.parametrize("scores", [False, True])
def test_few_particles_in_many_dimensions_are_not_copied(scores, monkeypatch):
    """Pieces of some thousand coordinates, and matrices of 20 x 20."""
    for name in ("WHOLE", "ROOM"):  # as if the cloud were larger
        monkeypatch.setattr(skinny, name, 0)
    jax.clear_caches()

    def both(r2):
        value = jnp.exp(-r2)
        return (value, 2 * value) if scores else value

    interact = lambda x, v: pairwise.interact(x, x, both, values=v if scores else None)
    used = temporary(interact, *[cloud(20, 400_000)] * 2)
    assert used < 5 * 4 * 20 * skinny.LARGE < 4 * 20 * 400_000 / 4


@pytest.mark.parametrize("exact", [False, True])
def test_a_whole_step_of_svgd(exact):
    """Strips; the state is written where it was read."""
    kernel = px.kernels.RBF(px.kernels.Median(subsample=None if exact else 512))
    flow = px.svgd(px.Target(lambda x: -0.5 * jnp.sum(x**2)), optimizer=optax.adam(0.1), kernel=kernel)  # fmt: skip
    state = flow.init(jax.random.normal(jax.random.key(0), (4000, 2)))
    used = temporary(lambda key, s: flow.step(key, s)[0], jax.random.key(0), state, donate=(1,))
    assert used < 2 * STRIP + 64 * 4 * 4000


CLOUDS = {"RMSprop": 1, "SGLD": 2, "SVGD": 2, "w-SGLD": 2, "w-SGLD-B": 2, "pi-SGLD": 2}
"""Clouds beside the state: the gradient; gradient and noise; gradient and direction."""
AT_ONCE = ("SVGD", "w-SGLD", "w-SGLD-B", "pi-SGLD")


@pytest.mark.parametrize(
    ("method", "at_once"),
    [(name, False) for name in CLOUDS] + [(name, True) for name in AT_ONCE],
)
def test_a_step_of_networks(method, at_once, monkeypatch):
    """In pieces, or leaf by leaf where those are small enough to be mixed at once."""
    monkeypatch.setattr(skinny, "LARGE", 1024)  # the networks are small, and so must be the pieces
    monkeypatch.setattr("particlax.flow.SMALL", 1 << 14)
    monkeypatch.setattr(skinny, "WHOLE", 1 << 27 if at_once else 0)
    flow = mnist.flows(mnist.Config(), 100, 1000)[method]()
    start = functools.partial(mnist.start, 100)
    particles = jax.vmap(start)(jax.random.split(jax.random.key(0), 10))
    batch = {"x": jnp.zeros((20, 784)), "y": jnp.zeros(20, int)}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(particles))
    step = lambda key, state, batch: flow.step(key, state, batch)[0]
    used = temporary(step, jax.random.key(0), flow.init(particles), batch, donate=(1,))
    assert used < (CLOUDS[method] + 0.15) * size


@pytest.mark.parametrize("method", ["RMSprop", "SVGD", "w-SGLD", "w-SGLD-B", "pi-SGLD"])
def test_new_networks_are_written_over_the_old_ones(method, monkeypatch):
    """A loop over steps does not copy any weights. (XLA does copy the second ones, and the third, where nothing interacts.)"""
    monkeypatch.setattr("particlax.flow.SMALL", 1 << 14)  # biases; the networks are small
    flow = mnist.flows(mnist.Config(), 96, 1000)[method]()
    start = functools.partial(mnist.start, 96)
    particles = jax.vmap(start)(jax.random.split(jax.random.key(0), 10))
    batch = {"x": jnp.zeros((20, 784)), "y": jnp.zeros(20, int)}
    step = lambda _, state: flow.step(jax.random.key(0), state, batch)[0]
    loop = jax.jit(lambda state, num: lax.fori_loop(0, num, step, state), donate_argnums=0)
    program = loop.lower(flow.init(particles), 5).compile().as_text()
    assert program.count("f32[10,784,96]") > 3
    weights = r"784,96" if method == "RMSprop" else r"\d+,\d+"
    assert not re.findall(rf" = f32\[10,{weights}\]\S* copy\((?!%transpose)", program)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_traces_the_density_once(name):
    calls = []

    def density(x):
        calls.append(x.shape)
        return -0.5 * jnp.sum(x**2)

    made = SAMPLERS[name]()
    flow = px.Flow(px.Target(density), made.terms, made.integrator, made.metric)
    start = jax.random.normal(jax.random.key(0), (20, 2))
    for steps in (1, 6):
        px.run(flow, start, steps=steps, key=jax.random.key(1), progress=False)
    assert calls == [(2,)]


KERNELS = {
    "stein-131072-2": 1,
    "stein-65536-16": 1,
    "stein-65536-64": 1,
    "stein-16-25000000": 3,  # distances, for the pairs and for their floor (of which XLA can make one); mixing
    "blob-131072-2": 2,  # densities, then the force
    "gfsd-131072-2": 2,
    "transport-131072-2": 1,
    "median-8000-2": 3,
    "step-2000-2": 4,
    "step-8000-2": 4,
    "step-1048576-2": 4,
    "logistic-100": 0,  # too few particles for kernels to pay
    "networks-SGLD": 0,
    "networks-SVGD": 3,
    "networks-w-SGLD": 3,
    "networks-w-SGLD-B": 3,
    "networks-pi-SGLD": 3,  # both terms in one pass
}


def test_kernels_of_the_programs_for_a_gpu():
    """As many as when they were measured: no second pass over the cloud, none that is left to plain XLA."""
    found = {}
    for name, function, args in lowered.programs():
        text = lowered.lowered(function, args)
        found[name] = text.count("@__gpu$xla.gpu.triton")
        assert "tt.func" in text or not found[name]
    assert found == KERNELS


def test_launches_are_counted_outside_of_fusions():
    program = """HloModule jit_f
%fused_computation (p: f32[3]) -> f32[3] {
  %copy.1 = f32[3]{0} copy(%p)
}
%body (p: (s32[], f32[3])) -> (s32[], f32[3]) {
  %fusion.2 = (s32[], f32[3]{0}) fusion(%p), kind=kLoop, calls=%fused_computation
}
ENTRY %main (a: f32[3]) -> f32[3] {
  %a = f32[3]{0} parameter(0)
  %while.1 = (s32[], f32[3]{0}) while(%t), body=%body
  %custom.1 = (f32[3]{0}, f32[3]{0}) custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %copy.2 = f32[3]{0} copy(%a)
}
"""
    assert lowered.launches(program) == 3
