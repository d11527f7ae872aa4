"""What the devices of a mesh exchange in a step: read from the compiled program, beside the formulas of docs/scale.

python -m experiments run exchange                       # 2, 4 and 8 virtual devices of a CPU, some minutes
python -m experiments run exchange --devices=16 --record=sixteen
python -m experiments run exchange --platform=gpu --devices=8 --each=512,131072 --dims=2 --few=8 --wide=8192,1000000 --record=study-gpu

Particles are so many on each device: a step of weak scaling. With --platform=gpu programs are compiled for H200s, which need not be there
(benchmarks/absent.py): these also say whether our kernels take the sums, and whether messages are on their way meanwhile.
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
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import particlax as px
from benchmarks import absent
from experiments import config, report
from experiments.study import Evaluation, Run, Study, Table
from particlax import algorithms, engine, placement, sharding
from particlax.particles import num_particles

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
LOOP = re.compile(r"body=%?([\w.\-]+).*known_trip_count\D+(\d+)")
SENT = re.compile(rf"%([\w.\-]+) = (.*?) ({'|'.join(KINDS)})(-start)?\(")
KERNELS = {"_direct_body": "pairs", "_matrix_body": "pairs", "_body": "median", "_distance_body": "distances", "_gram_body": "distances", "_mix_body": "mixing"}  # fmt: skip
"""What the kernels of particlax do, by the names that they have in a program."""
KERNEL = re.compile(r"(fusion|custom-call)\(")
LARGE = 1 << 16
"""Particles above which `calibrated`, which solves for all pairs at once, is left out."""


class Message(NamedTuple):
    """One collective: its kind, the shapes of its result on a device, and how often a step runs it."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    size: int
    times: int
    hidden: bool = False
    """Whether something is computed between its start and the wait for it."""

    def received(self, devices: int) -> float:
        """Bytes that one device gets from others, by the usual ring algorithms."""
        share = (devices - 1) / devices
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0, "reduce-scatter": devices - 1}
        return factor.get(self.kind, share) * self.size * self.times


def messages(text: str) -> list[Message]:
    """The collectives of a compiled program; those in a loop of known length count that often."""
    loops = {name: int(times) for name, times in LOOP.findall(text)}
    found, inside, lines = [], "", text.splitlines()
    for place, line in enumerate(lines):
        if line and not line.startswith((" ", "}")):
            inside = line.split("(")[0].replace("ENTRY", "").strip().lstrip("%")
        match = SENT.search(line)
        if match:
            name, result, kind, start = match.groups()
            # What is started has its arguments beside its results, but for sums.
            result = _outermost(result)[1] if start and kind != "all-reduce" else result
            parts = re.findall(r"(\w+)\[([\d,]*)\]", result)
            shapes = [tuple(int(n) for n in dims.split(",") if n) for _, dims in parts]
            size = sum(_bytes(of, dims) for (of, _), dims in zip(parts, shapes, strict=True))
            times = loops.get(inside, 1)
            hidden = bool(start) and _busy(lines[place + 1 :], f"{kind}-done(%{name})")
            found.append(Message(kind, tuple(shapes), size, times, hidden))
    return found


def _outermost(result: str) -> list[str]:
    """The parts of a tuple."""
    parts, depth = [""], 0
    for letter in result[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _busy(lines: list[str], done: str) -> bool:
    """Whether a kernel runs before the wait."""
    between = itertools.takewhile(lambda line: done not in line, lines)
    return any(KERNEL.search(line) for line in between)


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count * WIDTHS.get(kind, 8)


def lowered(
    flow: Any, particles: Any, mesh: Any, data: Any = None, platform: str | None = None
) -> Any:
    """One step of `px.run(flow, particles, data=data, mesh=mesh)`, to be compiled for the mesh, whose devices need not be there."""
    state = jax.eval_shape(flow.init, particles)
    layout = placement.layout_of(mesh, state, num_particles(particles))
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    same = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
    key = same(jax.random.key(0))
    args = (jax.tree.map(same, data), (key, key), placement.placed(layout, state))

    def step(data: Any, keys: Any, state: Any) -> Any:
        return engine._step(engine.Fixed(flow, data, keys[0], keys[1], layout), state)[0]

    platform = platform or {"gpu": "cuda"}.get(mesh.devices.flat[0].platform)
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,) if platform else None)


def in_a_step(flow: Any, particles: Any, mesh: Any, data: Any = None) -> list[Message]:
    """Its collectives."""
    return messages(str(lowered(flow, particles, mesh, data).compile().as_text()))


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
    platform: str = "cpu"
    seeds: int = 1


def runs(c: Config) -> Iterator[Run]:
    """One for each way and number of devices; its evaluations are sizes and samplers."""
    if c.platform not in ("cpu", "gpu"):
        raise config.ConfigError(f"--platform={c.platform}: expected cpu or gpu")
    if c.platform == "gpu":
        absent.gpus()  # says what is missing
    for way in c.ways:
        clouds = [(num, c.dims[0]) for num in c.each] + [(c.each[0], dim) for dim in c.dims[1:]]
        for devices in c.devices:
            sizes = [(c.few, dim) for dim in c.wide] if way == "turned" else clouds
            settings = {"devices": devices, "way": way, "sizes": [[n * devices, d] for n, d in sizes]}  # fmt: skip
            settings |= {} if c.platform == "cpu" else {"platform": c.platform}
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
    extra = {} if settings.get("platform", "cpu") == "cpu" else {"device": absent.NAME}
    for row in json.loads(done.stdout.splitlines()[-1]):
        yield Evaluation(row, time.perf_counter() - began, extra)


def rows(mesh: Any, way: str, sizes: list[list[int]], samplers: list[str]) -> list[dict]:
    """Size, sampler, bytes by the formula, bytes of the compiled program; kernels, and how many messages wait behind work."""
    devices = mesh.devices.size
    target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    sharding.GATHER_BYTES = 0 if way == "ring" else 1 << 26
    found = []
    for (num, dim), name in itertools.product(sizes, samplers):
        if name == "calibrated" and not dim + 2 <= num <= LARGE:
            continue
        stepping = {"step_size": 0.01} if name in ("sgld", "sghmc", "calibrated") else {"optimizer": optax.adam(0.01)}  # fmt: skip
        flow = getattr(algorithms, name)(target, **stepping)
        program = lowered(flow, jax.ShapeDtypeStruct((num, dim), jnp.float32), mesh).compile()
        text = str(program.as_text())
        sent = messages(text)
        row = {"M": num, "D": dim, "sampler": name}
        row |= {"kinds": ", ".join(sorted({m.kind for m in sent})) or "none"}
        row |= {"formula": expected(name, num, dim, devices, ring=way == "ring")}
        row |= {"program": sum(m.received(devices) for m in sent)}
        row |= {"kernels": ", ".join(sorted({KERNELS[n] for n in re.findall(r'name = "(_\w+)"', text)})) or "none"}  # fmt: skip
        row |= {"messages": len(sent), "hidden": sum(m.hidden for m in sent)}
        found.append(row | {"mib": program.memory_analysis().temp_size_in_bytes / 2**20})
    return found


def table(found: list[dict]) -> report.Rows:
    """By sampler and way, of the most devices and the first size: bytes that one device receives, by the formula and in the program."""
    head = ["sampler", "M, D", "devices", "way", "formula", "program", "collectives"]
    found = [entry for entry in found if "platform" not in entry["config"]]
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
        if "platform" in c:
            continue
        group = (c["way"], int(m["M"]) // c["devices"], int(m["D"]), c["devices"])
        groups.setdefault(group, []).append(m)
    lines = []
    for (way, each, dim, devices), some in sorted(groups.items()):
        svgd = next((m for m in some if m["sampler"] == "svgd"), None)
        apart = max(abs(m["program"] - m["formula"]) / m["formula"] if m["formula"] else m["program"] for m in some)  # fmt: skip
        both = [f"{svgd[key]:.0f}" for key in ("formula", "program")] if svgd else ["-", "-"]
        lines.append([way, str(each), str(dim), str(devices), *both, f"{apart:.2%}"])
    return [head, *lines]


def gpu_table(found: list[dict]) -> report.Rows:
    """Of programs for GPUs: bytes, collectives, those on their way while something is computed, our kernels, memory."""
    head = ["sampler", "M, D", "GPUs", "way", "formula, bytes", "program, bytes", "collectives", "hidden behind work", "kernels", "temporary, MiB"]  # fmt: skip
    lines = [
        [f"`{m['sampler']}`", f"{m['M']:,.0f}, {m['D']:,.0f}", str(c["devices"]), c["way"], f"{m['formula']:,.0f}", f"{m['program']:,.0f}",
         m["kinds"], f"{m['hidden']:.0f} of {m['messages']:.0f}" if m["messages"] else "-", m["kernels"], f"{m['mib']:.3g}"]
        for c, m in ((entry["config"], entry["metrics"]) for entry in found)
        if "platform" in c and m["sampler"] not in ("sgld", "sghmc")
    ]  # fmt: skip
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
        "exchange-gpu": Table("Programs for 8 GPUs", gpu_table),
    },
    smoke={"devices": (2,), "ways": ("gather",), "each": (16,), "dims": (2,), "samplers": ("sgld", "svgd")},
)  # fmt: skip


def main(given: dict[str, Any], samplers: list[str]) -> None:
    """The rows of one setting, as JSON."""
    devices, platform = given.pop("devices"), given.pop("platform", "cpu")
    if platform == "gpu":
        mesh = jax.sharding.Mesh(np.array(absent.gpus(devices)), (placement.AXIS,))
        with absent.tracing():
            print(json.dumps(rows(mesh, **given, samplers=samplers)))
        return
    jax.config.update("jax_num_cpu_devices", devices)
    print(
        json.dumps(rows(jax.make_mesh((devices,), (placement.AXIS,)), **given, samplers=samplers))
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2].split(","))
