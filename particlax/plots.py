"""Pictures of clouds and densities; needs matplotlib (`pip install particlax[plots]`), imported when used."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from particlax.errors import OptionError, expect
from particlax.particles import flatten
from particlax.predictive import Reliability
from particlax.zoo import Density

__all__ = ["cloud", "contours", "grid", "reliability", "shade"]

INK, PAPER = "#1f4e79", "Blues"
USUAL = 5.0
"""Half the side of the window in which the zoo's densities lie."""


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise OptionError(
            "particlax.plots needs matplotlib, which is not installed; pip install particlax[plots]"
        ) from None
    return pyplot


def _lattice(density: Density, extent: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if density.dim != 2:
        raise OptionError(
            f"the density has D = {density.dim}; expected one on the plane, such as px.zoo.U1()"
        )
    side = np.linspace(-extent, extent, 201)
    first, second = np.meshgrid(side, side)
    points = jnp.asarray(np.stack([first, second], -1).reshape(-1, 2))
    values = np.asarray(jax.vmap(density.log_density)(points)).reshape(first.shape)
    return first, second, np.exp(values - values.max())


def shade(ax: Any, density: Density, extent: float = 5.0) -> Any:
    """Fill the axes with a 2-D density."""
    ax.contourf(*_lattice(density, extent), levels=20, cmap=PAPER)
    return _frame(ax, extent)


def contours(ax: Any, density: Density, extent: float = 5.0) -> Any:
    """Draw contour lines of a 2-D density."""
    ax.contour(*_lattice(density, extent), levels=[0.05, 0.3, 0.7], colors="0.65", linewidths=0.6)
    return _frame(ax, extent)


def cloud(
    ax: Any, particles: PyTree, size: float | None = None, extent: float | None = None
) -> Any:
    """Scatter the first two coordinates of a cloud, on [-5, 5]² or where it is, if that is elsewhere."""
    x = np.asarray(flatten(particles)[0])
    if x.shape[1] < 2:
        raise OptionError(
            f"the cloud has {x.shape[1]} coordinate; expected two at least: draw one with ax.hist(particles)"
        )
    size = min(12.0, 2.0 + 300.0 / len(x)) if size is None else size
    ax.scatter(x[:, 0], x[:, 1], s=size, c=INK, alpha=0.75, linewidths=0, rasterized=len(x) > 500)
    if extent is None and np.mean(np.max(np.abs(x[:, :2]), 1) <= USUAL) < 0.9:
        return ax
    return _frame(ax, USUAL if extent is None else extent)


def reliability(ax: Any, diagram: Reliability) -> Any:
    """Draw a reliability diagram, `pred.reliability(y)`: accuracy by bin of confidence, and the diagonal.

    The number in a bin is that of its predictions, and bins with few are pale.
    """
    expect("diagram", diagram, Reliability, "pred.reliability(y)")
    bins, full = len(diagram.count), diagram.count > 0
    left, count = np.arange(bins)[full] / bins, diagram.count[full]
    bars = ax.bar(left, diagram.accuracy[full], 1 / bins, align="edge", color=INK)
    for bar, x, num in zip(bars, left, count, strict=True):
        bar.set_alpha(0.25 + 0.6 * np.log1p(num) / np.log1p(count.max()))
        ax.text(x + 0.5 / bins, 0.01, f"{num}", ha="center", fontsize=min(8, 70 / bins))
    ax.plot([0, 1], [0, 1], color="0.65", linewidth=0.6)
    ax.plot(
        diagram.confidence[full],
        diagram.accuracy[full],
        "o",
        color="black",
        markersize=3,
        clip_on=False,
    )
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
    ax.set_title(f"ECE {diagram.ece:.1%}")
    return ax


def _frame(ax: Any, extent: float) -> Any:
    ax.set(xlim=(-extent, extent), ylim=(-extent, extent), xticks=[], yticks=[], aspect="equal")
    return ax


def grid(
    rows: Mapping[str, Mapping[str, PyTree]],
    densities: Mapping[str, Density],
    *,
    truth: bool = True,
    size: float | None = None,
) -> Any:
    """One panel per sampler (row) and density (column); with `truth`, a first row of the densities.

    `rows[sampler][density]` is a cloud. Returns the matplotlib figure.
    """
    pyplot = _pyplot()
    height = len(rows) + truth
    figure, axes = pyplot.subplots(
        height,
        len(densities),
        figsize=(1.9 * len(densities) + 0.5, 1.9 * height + 0.3),
        squeeze=False,
        layout="constrained",
    )
    for column, (name, density) in enumerate(densities.items()):
        axes[0, column].set_title(name)
        if truth:
            shade(axes[0, column], density)
        for row, clouds in enumerate(rows.values(), start=int(truth)):
            contours(axes[row, column], density)
            cloud(axes[row, column], clouds[name], size, USUAL)
    for row, name in enumerate((["truth"] if truth else []) + list(rows)):
        axes[row, 0].set_ylabel(name)
    return figure
