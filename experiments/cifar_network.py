"""The convolutional network of the CIFAR-10 study, fast for many networks at once on a GPU.

A 3x3 convolution is the nine shifted images side by side, times a matrix. M networks under vmap then are a batched matrix
product, where M convolutions would become a grouped one. In the first layer the shifted images are the same for all
networks and are made once. Products have bfloat16 factors and float32 sums; parameters, their gradients and the statistics of batch norm
are float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from particlax import gpu, networks

MEAN, SD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's channels
GREY = tuple(round(255 * value) for value in MEAN)
EPSILON = 1e-5  # of batch norm


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the network looks like and how it is computed."""

    widths: tuple[int, ...] = (64, 128, 256)
    dense: int = 1024
    dropout: tuple[float, ...] = (
        0.1,
        0.2,
        0.3,
        0.5,
    )  # after each convolution, after the dense layer
    side: int = 32
    conv: str = "patches"  # or conv
    precision: str = "bfloat16"  # or float32
    momentum: float = 0.9  # of batch norm's running statistics
    activation: str = "relu"  # or silu, gelu
    classes: int = 10


def patches(x: jax.Array) -> jax.Array:
    """[n, h, w, c] to [n, h, w, 9 c]: the pixels around each one, row by row, zeros beyond the border."""
    height, width = x.shape[1:3]
    wide = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    parts = [wide[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(parts, -1)


def unpatched(around: jax.Array) -> jax.Array:
    """The transpose of `patches`: what came to each pixel, added up in float32."""
    height, width = around.shape[1:3]
    total: Any = 0.0
    for place, part in enumerate(jnp.split(around.astype(jnp.float32), 9, -1)):
        i, j = divmod(place, 3)
        wide = jnp.pad(part, ((0, 0), (i, 2 - i), (j, 2 - j), (0, 0)))
        total = total + wide[:, 1 : 1 + height, 1 : 1 + width]
    return lax.optimization_barrier(total.astype(around.dtype))  # or it is written in float32


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w in the precision of x, for float32 w.

    The hardware sums in float32 and rounds once, at the end. The gradient is written out, since the derived one would multiply in
    float32 wherever a sum is asked for in float32, as for w here.
    """
    return jnp.matmul(x, w.astype(x.dtype), preferred_element_type=x.dtype)


def _product_fwd(x: jax.Array, w: jax.Array) -> Any:
    return product(x, w), (x, w)


def _product_bwd(kept: Any, g: jax.Array) -> Any:
    x, w = kept
    dx = jnp.matmul(g, w.astype(x.dtype).T, preferred_element_type=x.dtype)
    axes = tuple(range(x.ndim - 1))
    dw = lax.dot_general(x, g, ((axes, axes), ((), ())), preferred_element_type=w.dtype)
    return dx, dw


product.defvjp(_product_fwd, _product_bwd)


@jax.custom_vjp
def surroundings(x: jax.Array) -> jax.Array:
    """`patches` of x, which is computed before: nine times for nine places otherwise."""
    return gpu.choose(fits(x), copied, patches, lax.optimization_barrier(x))


surroundings.defvjp(lambda x: (surroundings(x), None), lambda _, g: (unpatched(g),))


def fits(x: jax.Array) -> bool:
    """Whether `copied` takes x: rows and channels are powers of 2, as Triton has it."""
    width, channels = x.shape[2:]
    return x.dtype == jnp.bfloat16 and channels >= 16 and not (width & (width - 1) or channels & (channels - 1))  # fmt: skip


def copied(x: jax.Array) -> jax.Array:
    """`patches` by a kernel of its own: XLA's for joining arrays moves number by number."""
    num, height, width, channels = x.shape
    kernel = functools.partial(_copy_body, height=height, width=width, channels=channels)
    shape = jax.ShapeDtypeStruct((num, height, width, 9, channels), x.dtype)
    return gpu.launch(kernel, shape, (num, height), x).reshape(num, height, width, -1)


def _copy_body(x_ref: Any, out_ref: Any, *, height: int, width: int, channels: int) -> None:
    """Nine shifted copies of one row of one image."""
    from jax.experimental import pallas as pl  # noqa: PLC0415
    from jax.experimental.pallas import triton  # noqa: PLC0415

    image, row = pl.program_id(0), pl.program_id(1)
    column = lax.broadcasted_iota(jnp.int32, (width, channels), 0)
    channel = lax.broadcasted_iota(jnp.int32, (width, channels), 1)
    for place in range(9):
        i, j = row + place // 3 - 1, column + place % 3 - 1
        inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        near = jnp.clip(i, 0, height - 1), jnp.clip(j, 0, width - 1)
        part = triton.load(x_ref.at[image, near[0], near[1], channel], mask=inside, other=0.0)
        triton.store(out_ref.at[image, row, column, place, channel], part)


def convolve(x: jax.Array, w: jax.Array, how: str = "patches") -> jax.Array:
    """x [n, h, w, c] with w [3, 3, c, d], zeros beyond the border, in the precision of x."""
    if how == "conv":
        return lax.conv_general_dilated(
            x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    flat, around = w.reshape(-1, w.shape[-1]), surroundings(x)
    if (missing := -len(flat) % 8) > 0:  # tensor cores want whole eights; 27 of the first layer
        around = jnp.pad(around, ((0, 0), (0, 0), (0, 0), (0, missing)))
        flat = jnp.pad(flat, ((0, missing), (0, 0)))
    return product(around, flat)


@jax.custom_vjp
def pool(x: jax.Array) -> jax.Array:
    """The largest of each 2x2 pixels; the gradient goes to the first of equals."""
    return _pooled(x)[0]


def _pooled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest, and which of the four it is: all that the gradient needs, so that x is not kept."""
    first, second, third, fourth = (x[:, i::2, j::2] for i in range(2) for j in range(2))
    best = jnp.maximum(jnp.maximum(first, second), jnp.maximum(third, fourth))
    place = jnp.where(third == best, jnp.uint8(2), jnp.uint8(3))
    place = jnp.where(second == best, jnp.uint8(1), place)
    return best, jnp.where(first == best, jnp.uint8(0), place)


def _pool_bwd(place: jax.Array, g: jax.Array) -> Any:
    num, height, width, channels = g.shape
    corners = jnp.arange(4, dtype=jnp.uint8).reshape(1, 1, 2, 1, 2, 1)
    among = lambda a: a[:, :, None, :, None]
    spread = jnp.where(among(place) == corners, among(g), 0)
    return (spread.reshape(num, 2 * height, 2 * width, channels),)


pool.defvjp(_pooled, _pool_bwd)


def moments(x: jax.Array) -> dict[str, jax.Array]:
    """Mean and variance of each channel over the batch, in float32."""
    wide, axes = x.astype(jnp.float32), tuple(range(x.ndim - 1))
    mean = jnp.mean(wide, axes)
    return {"mean": mean, "var": jnp.maximum(jnp.mean(wide**2, axes) - mean**2, 0)}


def normed(x: jax.Array, layer: dict[str, jax.Array], seen: dict[str, jax.Array]) -> jax.Array:
    """Batch norm of x with the statistics `seen`, in float32."""
    gain = layer["scale"] * lax.rsqrt(seen["var"] + EPSILON)
    return x.astype(jnp.float32) * gain + (layer["bias"] - seen["mean"] * gain)


@jax.custom_vjp
def batch_normed(
    x: jax.Array, layer: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Batch norm of x with its own moments, and these, which are not for differentiating.

    The gradient is written out: two sums over the batch, in one pass, and one pass more.
    """
    seen = moments(x)
    return normed(x, layer, seen), seen


def _normed_fwd(x: jax.Array, layer: dict[str, jax.Array]) -> Any:
    out, seen = batch_normed(x, layer)
    return (out, seen), (x, layer["scale"], seen)


def _normed_bwd(kept: Any, slopes: Any) -> Any:
    x, scale, seen = kept
    g, axes = slopes[0], tuple(range(x.ndim - 1))
    spread = lax.rsqrt(seen["var"] + EPSILON)
    unit = (x.astype(jnp.float32) - seen["mean"]) * spread
    layer = {"scale": jnp.sum(g * unit, axes), "bias": jnp.sum(g, axes)}
    num = x.size // x.shape[-1]
    dx = scale * spread * (g - (layer["bias"] + unit * layer["scale"]) / num)
    return dx.astype(x.dtype), layer


batch_normed.defvjp(_normed_fwd, _normed_bwd)


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Each value kept with probability 1 - rate, to the nearest 1/256, and scaled up: a random byte decides."""
    if not (bar := round(256 * rate)):
        return x
    words = jax.random.bits(key, (-(-x.size // 4),), jnp.uint32)
    drawn = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: x.size].reshape(x.shape)
    return jnp.where(drawn >= bar, x * (256 / (256 - bar)), 0)


def start(shape: Shape, key: jax.Array) -> tuple[dict[str, Any], list[dict[str, jax.Array]]]:
    """Parameters and running statistics of one network: He's normal weights, batch norm at 1 and 0."""
    params: dict[str, Any] = {}
    keys = iter(jax.random.split(key, len(shape.widths) + 2))
    he = lambda *size: jax.random.normal(next(keys), size) * np.sqrt(2 / np.prod(size[:-1]))
    sizes, channels = [*shape.widths, shape.dense], 3
    for place, size in enumerate(shape.widths, 1):
        params[f"conv{place}"] = he(3, 3, channels, size)
        channels = size
    pixels = (shape.side >> len(shape.widths)) ** 2
    params["dense"] = he(pixels * channels, shape.dense)
    params["out"] = {"w": he(shape.dense, shape.classes), "b": jnp.zeros(shape.classes)}
    for place, size in enumerate(sizes, 1):
        params[f"norm{place}"] = {"scale": jnp.ones(size), "bias": jnp.zeros(size)}
    return params, [{"mean": jnp.zeros(size), "var": jnp.ones(size)} for size in sizes]


def logits(
    shape: Shape, params: dict[str, Any], x: jax.Array, carried: list, key: jax.Array | None
) -> tuple[jax.Array, list]:
    """The network on bytes x [n, side, side, 3]; without a key it predicts, from its running statistics."""
    kind = jnp.dtype(shape.precision)
    x = ((x / jnp.float32(255) - jnp.array(MEAN)) / jnp.array(SD)).astype(kind)
    moved = []
    last = len(shape.widths)
    for place in range(last + 1):
        if place < last:
            x = pool(convolve(x, params[f"conv{place + 1}"], shape.conv))
        else:
            x = product(x.reshape(len(x), -1), params["dense"])
        layer, seen = params[f"norm{place + 1}"], carried[place]
        x, seen = (normed(x, layer, seen), seen) if key is None else batch_normed(x, layer)
        x = getattr(jax.nn, shape.activation)(x)
        if key is not None:
            x = dropped(x, shape.dropout[place], jax.random.fold_in(key, place))
            seen = jax.tree.map(functools.partial(_averaged, shape.momentum), carried[place], seen)
        moved.append(seen)
        x = x.astype(kind)
    out = params["out"]
    return x.astype(jnp.float32) @ out["w"] + out["b"], moved


def _averaged(momentum: float, old: jax.Array, new: jax.Array) -> jax.Array:
    return momentum * old + (1 - momentum) * lax.stop_gradient(new)


@functools.cache
def network(shape: Shape) -> networks.Network:
    """The network as px.networks takes it; the same object for the same shape, so that it is compiled once."""
    return networks.Network(
        functools.partial(start, shape),
        lambda params, x, carried: logits(shape, params, x, carried, None)[0],
        functools.partial(logits, shape),
        stateful=True,
    )


def augmented(key: jax.Array, x: jax.Array, crop: int, cutout: int = 0) -> jax.Array:
    """Each image shifted by up to `crop` pixels, reflected where it ends, and half of them mirrored.

    With `cutout` a square of that side, anywhere, is painted grey (DeVries & Taylor 2017).
    """
    num, height, width, channels = x.shape
    turn, shift, hole = jax.random.split(key, 3)
    wide = jnp.pad(x, ((0, 0), (crop, crop), (crop, crop), (0, 0)), mode="reflect")
    corner = jax.random.randint(shift, (num, 2), 0, 2 * crop + 1)
    cut = lambda image, at: lax.dynamic_slice(image, (at[0], at[1], 0), (height, width, channels))
    cropped = jax.vmap(cut)(wide, corner)
    mirrored = jax.random.bernoulli(turn, 0.5, (num, 1, 1, 1))
    seen = jnp.where(mirrored, cropped[:, :, ::-1], cropped)
    if not cutout:
        return seen
    first = jax.random.randint(
        hole, (2, num, 1), 1 - cutout, jnp.array([height, width])[:, None, None]
    )
    inside = [
        (jnp.arange(n) >= a) & (jnp.arange(n) < a + cutout)
        for n, a in zip((height, width), first, strict=True)
    ]
    gone = (inside[0][:, :, None] & inside[1][:, None, :])[..., None]
    return jnp.where(gone, jnp.asarray(GREY, x.dtype), seen)


@functools.cache
def augmenting(crop: int, cutout: int = 0) -> Callable[[Any, Any], Any]:
    """`transform` for px.Minibatches: the images "x" of a batch, augmented once for all particles.

    The barrier keeps the compiler from working out a batch again in each of the places that use it: with the shuffle of the rows
    in it, compilation took minutes.
    """

    def transform(key: Any, batch: Any) -> Any:
        return lax.optimization_barrier({**batch, "x": augmented(key, batch["x"], crop, cutout)})

    return transform
