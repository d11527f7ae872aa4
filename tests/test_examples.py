"""The examples are short, run as they stand, and reach what the documentation says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import particlax

ROOT = Path(particlax.__file__).parent.parent
DIGITS = ROOT / "examples" / "digits.py"


def run(path, folder):
    """What the example prints, in an empty folder; a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_is_short():
    assert len(DIGITS.read_text().splitlines()) <= 40


def test_digits(tmp_path):
    for package in ("flax", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    printed = run(DIGITS, tmp_path)
    line = r"T = ([\d.]+): accuracy ([\d.]+), NLL ([\d.]+), ECE ([\d.]+)"
    plain, tempered = ([float(part) for part in found] for found in re.findall(line, printed))
    for temperature, accuracy, nll, ece in (plain, tempered):
        assert 0.5 < temperature <= 1
        assert accuracy >= 0.97
        assert nll < 0.09
        assert ece < 0.035
    assert tempered[2] < plain[2]
    assert tempered[3] <= 0.02
    figure = (tmp_path / "digits.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    assert len(figure) > 5000
