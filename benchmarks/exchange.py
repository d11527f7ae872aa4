"""What the devices of a mesh exchange in a step: read from the compiled program, beside the formulas of docs/scale.

python -m experiments run exchange                       # 2, 4 and 8 virtual devices of a CPU, some minutes
python -m experiments run exchange --devices=16 --record=sixteen

Particles are so many on each device: a step of weak scaling.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import particlax as px
from experiments import report
from experiments.study import Evaluation, Run, Study, Table
from particlax import algorithms, engine, placement, sharding
from particlax.particles import num_particles

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
LOOP = re.compile(r"body=%?([\w.\-]+).*known_trip_count\D+(\d+)")
SENT = re.compile(rf"= (\([^)]*\)|\S+) ({'|'.join(KINDS)})(?:-start)?\(")


class Message(NamedTuple):
    """One collective: its kind, the shapes of its result on a device, and how often a step runs it."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    size: int
    times: int

    def received(self, devices: int) -> float:
        """Bytes that one device gets from others, by the usual ring algorithms."""
        share = (devices - 1) / devices
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0, "reduce-scatter": devices - 1}
        return factor.get(self.kind, share) * self.size * self.times


def messages(text: str) -> list[Message]:
    """The collectives of a compiled program; those in a loop of known length count that often."""
    loops = {name: int(times) for name, times in LOOP.findall(text)}
    found, inside = [], ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")):
            inside = line.split("(")[0].replace("ENTRY", "").strip().lstrip("%")
        match = SENT.search(line)
        if match:
            parts = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            shapes = [tuple(int(n) for n in dims.split(",") if n) for _, dims in parts]
            size = sum(_bytes(kind, dims) for (kind, _), dims in zip(parts, shapes, strict=True))
            found.append(Message(match[2], tuple(shapes), size, loops.get(inside, 1)))
    return found


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count * WIDTHS.get(kind, 8)


def in_a_step(flow: Any, particles: Any, mesh: Any, data: Any = None) -> list[Message]:
    """The collectives of one step of `px.run(flow, particles, data=data, mesh=mesh)`."""
    state = flow.init(particles)
    layout = placement.layout_of(mesh, state, num_particles(particles))
    state, data = placement.put(layout, state), placement.replicated(layout, data)
    keys = placement.replicated(layout, (jax.random.key(0), jax.random.key(1)))

    def step(data: Any, keys: Any, state: Any) -> Any:
        return engine._step(engine.Fixed(flow, data, keys[0], keys[1], layout), state)[0]

    return messages(str(jax.jit(step).lower(data, keys, state).compile().as_text()))


def expected(
    name: str, num: int, dim: int, devices: int, *, width: int = 4, ring: bool = False
) -> float:
    """Bytes that one device receives in a step of a sampler with its defaults (docs/scale)."""
    share, cloud = (devices - 1) / devices, num * dim * width
    few = num <= 64 and dim > 4096
    median = 2 * 512 * dim * width if num > 512 else 0
    vector = num * width
    if name in ("sgld", "sghmc"):
        return 0.0
    if few:
        turns = {"svgd": 3, "w_sgld": 2, "w_sgld_b": 2, "pi_sgld": 3}[name]
        gram = 2 * num * num * width
        return share * (turns * cloud / devices + gram + (vector if name == "w_sgld_b" else 0))
    gathered = {"svgd": 2, "w_sgld": 1, "w_sgld_b": 1, "pi_sgld": 2, "calibrated": 2}[name]
    if ring:  # every sum has a round of its own; between two devices it is one hop, which sums over the same cloud share
        gathered = {"svgd": 2, "w_sgld": 1, "w_sgld_b": 2, "pi_sgld": 3, "calibrated": 4}[name]
        gathered -= devices == 2 and name in ("w_sgld_b", "pi_sgld", "calibrated")
    masses = vector if name in ("w_sgld_b", "calibrated") else 0
    factors = min(cloud, devices * dim * dim * width if cloud > sharding.FACTOR_BYTES else cloud)
    factors = factors if name == "calibrated" else 0
    return share * (gathered * cloud + median + masses + factors)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison: on each device so many particles in two and more dimensions, or so many networks."""

    devices: tuple[int, ...] = (2, 4, 8)
    ways: tuple[str, ...] = ("gather", "ring", "turned")
    each: tuple[int, ...] = (512, 1024)
    dims: tuple[int, ...] = (2, 8)
    few: int = 4
    wide: tuple[int, ...] = (8192, 16384)
    samplers: tuple[str, ...] = tuple(algorithms.__all__)
    seeds: int = 1


def runs(c: Config) -> Iterator[Run]:
    """One for each way and number of devices; its evaluations are sizes and samplers."""
    for way in c.ways:
        clouds = [(num, c.dims[0]) for num in c.each] + [(c.each[0], dim) for dim in c.dims[1:]]
        for devices in c.devices:
            sizes = [(c.few, dim) for dim in c.wide] if way == "turned" else clouds
            settings = {"devices": devices, "way": way, "sizes": [[n * devices, d] for n, d in sizes]}  # fmt: skip
            yield Run(settings, 0, functools.partial(evaluated, settings, c.samplers))


def evaluated(settings: dict[str, Any], samplers: tuple[str, ...]) -> Iterator[Evaluation]:
    """In a process of its own, which has the devices."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.exchange", json.dumps(settings), ",".join(samplers)]  # fmt: skip
    # Collectives on the CPU are those of the same program elsewhere.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    for row in json.loads(done.stdout.splitlines()[-1]):
        yield Evaluation(row, time.perf_counter() - began)


def rows(devices: int, way: str, sizes: list[list[int]], samplers: list[str]) -> list[dict]:
    """Size, sampler, bytes by the formula, bytes of the compiled program."""
    mesh = jax.make_mesh((devices,), (placement.AXIS,))
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    sharding.GATHER_BYTES = 0 if way == "ring" else 1 << 26
    found = []
    for (num, dim), name in itertools.product(sizes, samplers):
        if name == "calibrated" and num < dim + 2:
            continue
        stepping = {"step_size": 0.01} if name in ("sgld", "sghmc", "calibrated") else {"optimizer": optax.adam(0.01)}  # fmt: skip
        flow = getattr(algorithms, name)(target, **stepping)
        cloud = px.particles.normal(jax.random.key(0), num, like=jnp.zeros(dim))
        sent = in_a_step(flow, cloud, mesh)
        row = {"M": num, "D": dim, "sampler": name}
        row |= {"kinds": ", ".join(sorted({m.kind for m in sent})) or "none"}
        row |= {"formula": expected(name, num, dim, devices, ring=way == "ring")}
        found.append(row | {"program": sum(m.received(devices) for m in sent)})
    return found


def table(found: list[dict]) -> report.Rows:
    """By sampler and way, of the most devices and the first size: bytes that one device receives, by the formula and in the program."""
    head = ["sampler", "M, D", "devices", "way", "formula", "program", "collectives"]
    most = max((entry["config"]["devices"] for entry in found), default=0)
    lines = [
        [f"`{m['sampler']}`", f"{m['M']:.0f}, {m['D']:.0f}", str(c["devices"]), c["way"], f"{m['formula']:.0f}", f"{m['program']:.0f}", m["kinds"]]
        for c, m in ((entry["config"], entry["metrics"]) for entry in found)
        if c["devices"] == most and [m["M"], m["D"]] == c["sizes"][0]
    ]  # fmt: skip
    return [head, *lines]


def sizes_table(found: list[dict]) -> report.Rows:
    """By way, size and number of devices: the bytes of SVGD, and how far any sampler's are from its formula."""
    head = ["way", "M on each device", "D", "devices", "SVGD, formula", "SVGD, program", "largest difference of any sampler"]  # fmt: skip
    groups: dict[tuple, list[dict]] = {}
    for entry in found:
        c, m = entry["config"], entry["metrics"]
        group = (c["way"], int(m["M"]) // c["devices"], int(m["D"]), c["devices"])
        groups.setdefault(group, []).append(m)
    lines = []
    for (way, each, dim, devices), some in sorted(groups.items()):
        svgd = next((m for m in some if m["sampler"] == "svgd"), None)
        apart = max(abs(m["program"] - m["formula"]) / m["formula"] if m["formula"] else m["program"] for m in some)  # fmt: skip
        both = [f"{svgd[key]:.0f}" for key in ("formula", "program")] if svgd else ["-", "-"]
        lines.append([way, str(each), str(dim), str(devices), *both, f"{apart:.2%}"])
    return [head, *lines]


STUDY = Study(
    name="exchange",
    title="What the devices of a mesh exchange in a step",
    paper="",
    takes="5 minutes",
    config=Config,
    runs=runs,
    tables={
        "exchange": Table("Bytes that one device receives in a step", table),
        "exchange-sizes": Table("The same against particles, dimensions and devices", sizes_table),
    },
    smoke={"devices": (2,), "ways": ("gather",), "each": (16,), "dims": (2,), "samplers": ("sgld", "svgd")},
)  # fmt: skip


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", given["devices"])
    print(json.dumps(rows(**given, samplers=sys.argv[2].split(","))))
