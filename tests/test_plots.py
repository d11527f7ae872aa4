"""Pictures: the right panels with the right contents."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import particlax as px

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

DENSITIES = {"U1": px.zoo.U1(), "U2": px.zoo.U2(), "banana": px.zoo.Banana()}


@pytest.fixture(autouse=True)
def _close():
    yield
    pyplot.close("all")


def clouds(num=20):
    keys = jax.random.split(jax.random.key(0), len(DENSITIES))
    return {name: jax.random.normal(k, (num, 2)) for name, k in zip(DENSITIES, keys, strict=True)}


@pytest.mark.parametrize("truth", [True, False])
def test_grid(truth, tmp_path):
    rows = {"svgd": clouds(), "sgld": clouds(700)}
    figure = px.plots.grid(rows, DENSITIES, truth=truth)
    panels = figure.get_axes()
    height = 3 if truth else 2
    assert len(panels) == height * 3
    assert [ax.get_title() for ax in panels[:3]] == list(DENSITIES)
    labels = [ax.get_ylabel() for ax in panels[::3]]
    assert labels == (["truth"] if truth else []) + ["svgd", "sgld"]
    for row, name in enumerate(rows, start=int(truth)):
        for column, density in enumerate(DENSITIES):
            (scatter,) = [
                c
                for c in panels[3 * row + column].collections
                if isinstance(c, matplotlib.collections.PathCollection)
            ]
            np.testing.assert_allclose(scatter.get_offsets(), rows[name][density], rtol=1e-6)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_one_density_and_one_row():
    figure = px.plots.grid({"only": clouds()}, {"U1": DENSITIES["U1"]}, truth=False)
    assert len(figure.get_axes()) == 1


@pytest.mark.parametrize("draw", [px.plots.shade, px.plots.contours])
def test_densities(draw):
    _, ax = pyplot.subplots()
    assert draw(ax, px.zoo.U1(), extent=3.0) is ax
    assert ax.get_xlim() == ax.get_ylim() == (-3.0, 3.0)
    assert len(ax.collections) > 0


def test_lattice_is_the_density():
    """Heights at the lattice points, relative to the highest."""
    first, second, height = px.plots._lattice(px.zoo.Banana(), 2.0)
    values = np.array(
        [float(px.zoo.Banana().log_density(jnp.array([first[i, j], second[i, j]], jnp.float32)))
         for i, j in ((0, 0), (10, 150), (100, 100), (170, 30))]
    )  # fmt: skip
    got = np.log([height[i, j] for i, j in ((0, 0), (10, 150), (100, 100), (170, 30))])
    np.testing.assert_allclose(got - got[2], values - values[2], rtol=1e-4, atol=1e-4)
    assert height.max() == 1.0


def test_cloud_takes_pytrees_and_the_first_two_coordinates():
    _, ax = pyplot.subplots()
    tree = {"a": jnp.arange(5.0), "b": jnp.ones((5, 3))}
    px.plots.cloud(ax, tree)
    np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 0], np.arange(5.0))
    np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 1], 1.0)


def test_small_clouds_have_larger_dots():
    _, axes = pyplot.subplots(1, 2)
    for ax, num in zip(axes, (50, 2000), strict=True):
        px.plots.cloud(ax, jnp.zeros((num, 2)))
    sizes = [ax.collections[0].get_sizes()[0] for ax in axes]
    assert sizes[0] > sizes[1] > 0


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(px.errors.OptionError, match=r"matplotlib.*particlax\[plots\]"):
        px.plots.grid({"a": clouds()}, DENSITIES)


def test_a_cloud_that_lies_elsewhere_is_shown_where_it_is():
    _, (near, far, told) = pyplot.subplots(1, 3)
    x = jax.random.normal(jax.random.key(0), (50, 3))
    px.plots.cloud(near, x)
    px.plots.cloud(far, {"x": x + 100})
    px.plots.cloud(told, x + 100, extent=7.0)
    assert near.get_xlim() == (-5, 5)
    assert far.get_xlim()[0] > 90
    assert len(far.get_xticks()) > 0
    assert told.get_xlim() == (-7, 7)


def test_what_cannot_be_drawn_is_refused():
    _, ax = pyplot.subplots()
    with pytest.raises(px.errors.OptionError, match=r"1 coordinate.*ax\.hist"):
        px.plots.cloud(ax, jnp.zeros(9))
    for draw in (px.plots.shade, px.plots.contours):
        with pytest.raises(px.errors.OptionError, match="D = 3; expected one on the plane"):
            draw(ax, px.zoo.StudentT(3))
