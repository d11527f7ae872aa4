"""What the fused GPU kernels share: when they run, how they are launched, and the few operations that XLA has no word for.

The kernels are Pallas programs for Triton. They take float32, run where the program is compiled for an NVIDIA GPU, and have a
plain twin that gives their derivatives and runs elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

__all__ = [
    "add_square",
    "choose",
    "differentiable",
    "dot",
    "exact",
    "exp2",
    "fma",
    "halves",
    "launch",
    "once",
    "one_at",
    "partner",
    "possible",
]

MODE: str | None = None
"""For tests and comparisons: "interpret" runs the kernels' bodies anywhere, "plain" runs none."""


@functools.cache
def _triton() -> bool:
    """Whether this JAX still has Pallas for Triton (from 0.12 on it warns that it will go)."""
    try:
        from jax.experimental.pallas import triton

        return hasattr(triton, "CompilerParams")
    except ImportError:
        return False


def possible() -> bool:
    """Whether a fused kernel could run at all, so that preparations for it pay."""
    if MODE is not None:
        return MODE == "interpret"
    return jax.default_backend() == "gpu" and _triton()


def choose(fits: bool, fused: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """fused(*args) where the program is for a GPU and the work fits the kernel, else plain(*args)."""
    if not fits or not possible():
        return plain(*args)

    def narrow(*args: Any) -> Any:
        with jax.enable_x64(False):  # kernels are written for 32 bits
            return fused(*args)

    if MODE == "interpret":
        return narrow(*args)
    return lax.platform_dependent(*args, cuda=narrow, default=plain)


def differentiable(fused: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """`fused`, with the derivative of `plain`."""
    wrapped = jax.custom_jvp(fused)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return wrapped


def once(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher that is traced once for all its calls with arguments of the same shapes: kernels are long."""
    cached = jax.jit(lambda mode, *args: launcher(*args), static_argnums=0)
    return lambda *args: cached(MODE, *args)


def launch(
    kernel: Any,
    shapes: Any,
    grid: tuple[int, ...],
    *args: Array,
    warps: int = 4,
    stages: int = 3,
    aliases: dict[int, int] | None = None,
) -> Any:
    """The kernel's results; `aliases` names inputs whose memory becomes a result's."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=grid,
        input_output_aliases=aliases or {},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=MODE == "interpret",
    )(*args)


def _instruction(code: str, constraints: str, *args: Any) -> Array:
    from jax.experimental.pallas import triton

    shape = jnp.broadcast_shapes(*[jnp.shape(a) for a in args])
    kind = args[0].dtype
    like = lambda a: isinstance(a, jax.Array) and (a.shape, a.dtype) == (shape, kind)
    return triton.elementwise_inline_asm(
        code,
        args=[a if like(a) else jnp.broadcast_to(jnp.asarray(a, kind), shape) for a in args],
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, kind)],
    )[0]


def exp2(x: Array) -> Array:
    """2^x by the GPU's own instruction: relative error 2e-7, zero below 2^-126. `jnp.exp2` would take four."""
    if MODE == "interpret":
        return jnp.exp2(x)
    return _instruction("ex2.approx.ftz.f32 $0, $1;", "=f,f", x)


def fma(a: Array, b: Any, c: Any) -> Array:
    """a * b + c, rounded once. XLA compiles kernels so that products and sums are never fused unless it is said."""
    if MODE == "interpret":
        return a * b + c
    return _instruction("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c)


def add_square(a: Array, b: Array, c: Array) -> Array:
    """c + (a - b)^2."""
    if MODE == "interpret":
        return c + (a - b) ** 2
    code = "{ .reg .f32 d; sub.rn.f32 d, $1, $2; fma.rn.f32 $0, d, d, $3; }"
    return _instruction(code, "=f,f,f,f", a, b, c)


def one_at(place: Array) -> Array:
    """1 << place, and 0 for places that an int32 does not have."""
    if MODE == "interpret":
        return jnp.where((place >= 0) & (place < 32), jnp.int32(1) << (place & 31), 0)
    return _instruction("shl.b32 $0, 1, $1;", "=r,r", place)


def partner(x: Array, bit: int) -> Array:
    """What the thread holds whose number in the warp differs in one bit: x has one number for each of 32 threads."""
    if MODE == "interpret":
        return x.reshape(-1, 2, bit)[:, ::-1].reshape(32)
    return _instruction(f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, -1;", "=f,f", x)


def halves(tile: Array) -> tuple[Array, Array]:
    """The leading 11 bits of every number, which a tensor core keeps, and the rest."""
    bits = lax.bitcast_convert_type(tile, jnp.int32) & jnp.int32(-8192)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, tile - high


def dot(a: Array, b: Array) -> Array:
    """a @ b on a tensor core."""
    # The rounding of the factors is counted on: it must not follow `jax_default_matmul_precision`.
    return jnp.dot(a, b, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def exact(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    """The product of two numbers in halves, but for the product of the small ones."""
    return dot(a[1], b[0]) + dot(a[0], b[1]) + dot(a[0], b[0])
