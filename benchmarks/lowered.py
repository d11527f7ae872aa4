"""The programs behind the GPU figures of docs/speed, as text: made on any machine, to see whether they are still those that were measured.

python -m benchmarks.lowered FOLDER              # a file for each figure
PYTHONPATH=OLD python THIS/benchmarks/lowered.py FOLDER    # those of the revision in the folder OLD, which need not have this module
diff -r BEFORE AFTER                             # nothing: the same operations, the same kernels, and so the same figures
python -m benchmarks.lowered FOLDER compiled     # and how many kernels XLA makes of each, with its compiler for GPUs (`benchmarks.absent`)

What is left out is what does not run: places in the source, and operations whose results nobody uses.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax._src.interpreters import mlir, partial_eval
from jax.extend import core
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir
from jaxlib.triton import dialect

import particlax as px
from experiments import mnist
from particlax import medians
from particlax.diffusions import GFSD, Blob, FixedScale, Transport
from particlax.terms import Cloud, Frame

# As a script it stands beside another revision, whose package `benchmarks` may be older.
absent = importlib.import_module("benchmarks.absent" if __package__ else "absent")
EXACT = px.kernels.RBF(px.kernels.Median(subsample=None))
METHODS = ("SGLD", "SVGD", "w-SGLD", "w-SGLD-B", "pi-SGLD")


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array by shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


def velocity(term: Any, x: jax.Array) -> jax.Array:
    """A term's velocity at a cloud with the score -x."""
    return term(Cloud(x, -x, jnp.int32(0), Frame(), x), None, term.init(x))[0].drift


def stepping(flow: px.Flow, like: Any, batch: Any = None) -> tuple[Callable[..., Any], tuple]:
    """A step as `px.run` takes it: the new state, and the log density that is looked at."""
    key = jax.random.key(0)
    state = jax.eval_shape(
        lambda: flow.init(jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), like))
    )

    def step(key: Any, state: Any, batch: Any) -> Any:
        state, info = flow.step(key, state, batch)
        return state, info.log_density

    return step, (shaped(dtype=key.dtype), state, batch)


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Name, function and arguments, by shape, of everything that is measured."""
    rbf = px.kernels.RBF(bandwidth=2.0)
    for num, dim in ((131_072, 2), (65_536, 16), (65_536, 64)):
        yield f"stein-{num}-{dim}", functools.partial(velocity, px.Stein(kernel=rbf)), (shaped(num, dim),)  # fmt: skip
    yield "stein-16-25000000", functools.partial(velocity, px.Stein()), (shaped(16, 25_000_000),)
    fixed = Transport(coupling=FixedScale(lam=2.0))
    for name, term in {"blob": Blob(kernel=rbf), "gfsd": GFSD(kernel=rbf), "transport": fixed}.items():  # fmt: skip
        yield f"{name}-131072-2", functools.partial(velocity, term), (shaped(131_072, 2),)
    yield "median-8000-2", medians.median_sqdist, (shaped(8000, 2),)
    normal, adagrad = px.Target(lambda x: -0.5 * jnp.sum(x**2)), optax.adagrad(0.1)
    for num, kernel in ((2000, EXACT), (8000, EXACT), (1 << 20, px.kernels.RBF())):
        flow = px.svgd(normal, optimizer=adagrad, kernel=kernel)
        yield f"step-{num}-2", *stepping(flow, shaped(num, 2))
    logistic = px.Target(
        log_prior=lambda w: -0.5 * jnp.sum(w**2),
        log_likelihood=lambda w, b: -jax.nn.softplus((1 - 2 * b["y"]) * (b["x"] @ w)),
        num_data=464_810,
    )
    flow = px.svgd(logistic, optimizer=adagrad, kernel=EXACT)
    yield "logistic-100", *stepping(flow, shaped(100, 55), {"x": shaped(50, 55), "y": shaped(50)})
    flows = mnist.flows(mnist.Config(), 400, 60_000)
    keys = jax.random.split(jax.random.key(0), 20)
    networks = jax.eval_shape(jax.vmap(functools.partial(mnist.start, 400)), keys)
    batch = {"x": shaped(100, 784), "y": shaped(100, dtype=jnp.int32)}
    for name in METHODS:
        yield f"networks-{name}", *stepping(flows[name](), networks, batch)


LAUNCHED = r"= .*? (fusion|custom-call|copy|sort|reduce|gather|concatenate|dynamic-slice)\("


def launches(program: str) -> int:
    """Operations of a compiled program outside of fusions: so many kernels, loops counted once."""
    inside, count = False, 0
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside = re.match(r"%?(fused|wrapped)", line) is not None
        count += not inside and re.search(LAUNCHED, line) is not None
    return count


def compiled(function: Callable[..., Any], args: tuple) -> str:
    """What XLA makes of it for an H200 that need not be there."""
    one = SingleDeviceSharding(absent.gpus()[0])
    put = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one)
    with absent.tracing():
        traced = jax.jit(function).trace(*jax.tree.map(put, args))
        return str(traced.lower(lowering_platforms=("cuda",)).compile().as_text())


def lowered(function: Callable[..., Any], args: tuple) -> str:
    """StableHLO of what a GPU would run, each kernel as its text."""
    with absent.named(), absent.tracing():
        closed = jax.make_jaxpr(function)(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)  # fmt: skip
    run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts))
    with absent.named():
        traced = jax.jit(run).trace(*jax.tree.leaves(args))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r'ir = "((?:[^"\\]|\\.)*)"', lambda found: _kernel(found[1]), text)


def _kernel(escaped: str) -> str:
    """The text of a kernel whose bytes stand in a string."""
    plain = {"n": b"\n", "t": b"\t", '"': b'"', "\\": b"\\"}
    byte = lambda code: plain[code] if code in plain else bytes([int(code, 16)])
    pieces = re.split(r"\\([\\\"nt]|[0-9A-F]{2})", escaped)
    raw = b"".join(byte(p) if place % 2 else p.encode() for place, p in enumerate(pieces))
    with mlir.make_ir_context() as context:
        dialect.register_dialect(context)
        return f"ir = {ir.Module.parse(raw).operation.get_asm(enable_debug_info=False)}"


def main(arguments: list[str]) -> None:
    """Write them."""
    first, *more = arguments or ("-",)
    if first.startswith("-") or more not in ([], ["compiled"]):
        raise SystemExit(__doc__)
    folder = Path(first)
    folder.mkdir(parents=True, exist_ok=True)
    for name, function, args in programs():
        text = lowered(function, args)
        (folder / f"{name}.txt").write_text(text)
        made = f", {launches(compiled(function, args))} launches" if more else ""
        print(
            f"{name}: {text.count('@__gpu$xla.gpu.triton')} kernels{made}, {text.count(chr(10))} lines"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
