"""One JSON record per evaluation: settings, seed, revision, versions, device, metrics, seconds."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np

import particlax

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


def record(experiment: str, config: dict, seed: int, metrics: dict, seconds: float) -> dict:
    """A record of one evaluation, ready for JSON."""
    device = jax.devices()[0]
    return {
        "experiment": experiment,
        "config": config,
        "seed": seed,
        "metrics": _plain(metrics),
        "seconds": round(seconds, 3),
        "revision": REVISION,
        "versions": {"particlax": particlax.__version__, "jax": jax.__version__},
        "device": f"{device.platform}: {device.device_kind}",
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if np.ndim(value):
        return [_plain(item) for item in np.asarray(value)]
    return float(f"{float(value):.6g}")


def revision() -> str:
    """The commit the code was run at, marked when the tree had changes; a copy may be told it."""
    if told := os.environ.get("PARTICLAX_REVISION"):
        return told
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


REVISION = revision()  # once, at the start: the tree may change while an experiment runs


def write(path: Path, records: list[dict]) -> None:
    """Records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records))


def read(experiment: str) -> list[dict]:
    """All committed records of an experiment."""
    lines = []
    for path in sorted((RESULTS / experiment).glob("*.jsonl")):
        lines += path.read_text().splitlines()
    return [json.loads(line) for line in lines]
