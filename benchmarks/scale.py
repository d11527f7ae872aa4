"""Predictions of docs/scale: the time of a step on many GPUs, from figures of one GPU and the speed of links.

A step takes what a device computes, plus what it receives at the speed of its slowest link, plus the wait for each hop of the
exchange. Nothing is taken to overlap, so these are upper bounds of a simple model, not measurements.
"""

from typing import NamedTuple

from benchmarks.exchange import expected
from experiments import records, report

GPUS = (1, 8, 64, 512)
NODE = 8
"""GPUs that NVLink connects."""
NVLINK, INFINIBAND = 450e9, 50e9
"""Bytes a second into one GPU, within a node and from other nodes."""
HOP = 10e-6
"""Seconds for a message to the next GPU, however short."""
EXAMPLES = 4096
"""Examples of a step, each of which takes 6 operations for every parameter: forwards, and twice that backwards."""
ADAM, PRODUCTS = 7, 6
"""Adam reads direction, particles and two moments and writes three of them; operations for every pair and coordinate of an interaction: two for
its distance, four for two products."""
IMAGE = 6 * (32**2 * 27 * 64 + 16**2 * 576 * 128 + 8**2 * 1152 * 256 + 4096 * 1024 + 1024 * 10)
"""Operations that a gradient of the CIFAR-10 network takes for an image."""


class Rates(NamedTuple):
    """What one GPU was measured to do."""

    interacting: float
    """Numbers of the cloud in a second, through the interaction of few particles."""
    flops: float
    """Float32 operations in a second."""
    bytes: float
    """To and from memory, in a second."""
    learning: float
    """Operations of networks' gradients in a second, products in bfloat16, all else of a step included."""


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


def rates(pairs: list[dict], interaction: list[dict], cifar: list[dict]) -> Rates | None:
    """From the records of the studies of these names; None where one of them has none."""
    wide = [
        entry["config"]["M"] * entry["config"]["D"] / (entry["metrics"]["ms"] / 1e3)
        for entry in pairs
        if (entry["config"].get("part"), entry["metrics"]["path"]) == ("wide", "fused")
    ]
    limits = [e["machine"] for e in interaction if e["device"].startswith("gpu")]
    steps = [
        IMAGE * entry["config"]["particles"] * entry["config"]["batch"] / (entry["metrics"]["ms"] / 1e3)
        for entry in cifar
        if entry["config"]["method"] == "Adam"
    ]  # fmt: skip
    if not (wide and limits and steps):
        return None
    # Most records of CIFAR-10 are of processes that shared a GPU: the fastest had it alone.
    return Rates(max(wide), limits[0]["flops"], limits[0]["bytes"], max(steps))


def networks(num: int, dim: int, devices: int, gpu: Rates) -> Step:
    """SVGD of `num` networks, turned; above one network a GPU, each batch is divided and gradients are added up in the node."""
    parts = min(num, devices)
    each = devices // parts  # GPUs that share a network
    share = num * dim / parts
    gradient = share * 6 * EXAMPLES / gpu.learning / each
    interaction = max(share / gpu.interacting, PRODUCTS * num * share / gpu.flops)
    compute = gradient + interaction + ADAM * 4 * share / gpu.bytes
    received = expected("svgd", num, dim, parts)
    added = 2 * (each - 1) / each * 4 * dim / NVLINK  # the gradients of a network
    waiting = 4 * (parts - 1) * HOP + added
    return Step(compute, received, link(parts * each), waiting)


def clouds_table(found: list[dict]) -> report.Rows:
    """A million particles."""
    steps = measured(found)
    return _table([(n, cloud(10**6, n, steps)) for n in GPUS] if steps else [])


def networks_table(found: list[dict]) -> report.Rows:
    """64 networks of 1e8 parameters."""
    gpu = rates(found, records.read("interaction"), records.read("cifar"))
    return _table([(n, networks(64, 10**8, n, gpu)) for n in GPUS] if gpu else [])


def _table(steps: list[tuple[int, Step]]) -> report.Rows:
    rows = [["GPUs", "compute, ms", "received, MB", "exchange, ms", "step, ms", "speed-up", "of the ideal"]]  # fmt: skip
    for devices, step in steps:
        gain = steps[0][1].total / step.total
        numbers = (1e3 * step.compute, step.received / 1e6, 1e3 * step.exchange, 1e3 * step.total, gain)  # fmt: skip
        rows.append([str(devices), *(f"{number:.3g}" for number in numbers), f"{gain / devices:.0%}"])  # fmt: skip
    return rows
