"""Predictions of docs/scale: the time of a step on many GPUs, from figures of one GPU and the speed of links.

A step takes what a device computes, plus what it receives at the speed of its slowest link, plus the wait for each hop of the
exchange. Nothing is taken to overlap, so these are upper bounds of a simple model, not measurements.
"""

from typing import NamedTuple

from benchmarks.exchange import expected
from experiments import report

GPUS = (1, 8, 64, 512)
NODE = 8
"""GPUs that NVLink connects."""
NVLINK, INFINIBAND = 450e9, 50e9
"""Bytes a second into one GPU, within a node and from other nodes."""
HOP = 10e-6
"""Seconds for a message to the next GPU, however short."""
BANDWIDTH = 4e12
"""Bytes a second of an H200's memory that passes over large arrays reach: assumed, of 4.8e12 rated."""
PASSES = 12
"""How often an SVGD step with Adam goes over particles, scores and moments: 2 for distances, 4 for the mixing, 6 for Adam."""
GRADIENT_FLOPS, SUSTAINED = 6 * 4096, 4e14
"""Assumed: 4096 examples a step, 6 operations for each and each parameter, at 40 % of an H200's bfloat16 peak."""


class Step(NamedTuple):
    """Seconds of a step, and bytes that a device receives in it."""

    compute: float
    received: float
    link: float
    waiting: float

    @property
    def exchange(self) -> float:
        """Seconds on the links."""
        return self.received / self.link + self.waiting

    @property
    def total(self) -> float:
        """Seconds of it all."""
        return self.compute + self.exchange


def link(devices: int) -> float:
    """The slowest link among so many GPUs."""
    return NVLINK if devices <= NODE else INFINIBAND


def measured(found: list[dict]) -> list[tuple[int, float]]:
    """Particles and seconds of SVGD steps with the median of 512, by the kernels, from the records of `pairs`."""
    steps = [
        (entry["config"]["M"], entry["metrics"]["ms"] / 1e3)
        for entry in found
        if (entry["metrics"]["what"], entry["metrics"]["path"]) == ("step", "fused")
        and entry["config"]["median"] == "512"
    ]
    return sorted(steps)


def cloud(num: int, devices: int, steps: list[tuple[int, float]]) -> Step:
    """SVGD of `num` particles in 2-D: the smallest cloud's time is what never shrinks, the rest are pairs."""
    fixed, (most, longest) = steps[0][1], steps[-1]
    compute = fixed + (longest - fixed) * (num / most) ** 2 / devices
    received = expected("svgd", num, 2, devices)
    return Step(compute, received, link(devices), 2 * (devices - 1) * HOP)


def networks(num: int, dim: int, devices: int) -> Step:
    """SVGD of `num` networks, turned; above one network a GPU, each batch is divided and gradients are added up in the node."""
    parts = min(num, devices)
    each = devices // parts  # GPUs that share a network
    gradient = num / parts * dim * GRADIENT_FLOPS / SUSTAINED / each
    compute = gradient + PASSES * 4 * num * dim / parts / BANDWIDTH
    received = expected("svgd", num, dim, parts)
    added = 2 * (each - 1) / each * 4 * dim / NVLINK  # the gradients of a network
    waiting = 4 * (parts - 1) * HOP + added
    return Step(compute, received, link(parts * each), waiting)


def clouds_table(found: list[dict]) -> report.Rows:
    """A million particles."""
    steps = measured(found)
    return _table([(n, cloud(10**6, n, steps)) for n in GPUS] if steps else [])


def networks_table(found: list[dict]) -> report.Rows:
    """64 networks of 1e8 parameters; the records are not needed."""
    return _table([(n, networks(64, 10**8, n)) for n in GPUS])


def _table(steps: list[tuple[int, Step]]) -> report.Rows:
    rows = [["GPUs", "compute, ms", "received, MB", "exchange, ms", "step, ms", "speed-up", "of the ideal"]]  # fmt: skip
    for devices, step in steps:
        gain = steps[0][1].total / step.total
        numbers = (1e3 * step.compute, step.received / 1e6, 1e3 * step.exchange, 1e3 * step.total, gain)  # fmt: skip
        rows.append([str(devices), *(f"{number:.3g}" for number in numbers), f"{gain / devices:.0%}"])  # fmt: skip
    return rows
