"""CONTRIBUTING's guide is true: its classes, added to one file each, pass the contracts and are listed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"```python\n# (particlax/\w+\.py)\n(class (\w+)\(.*?)```", re.DOTALL)


def run(*command, cwd):
    environment = {**os.environ, "PYTHONPATH": str(cwd)}  # the changed copy, not the installed one
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("file", "code", "name"), BLOCK.findall(GUIDE), ids=["kernel", "diffusion"]
)
def test_following_the_guide(tmp_path, file, code, name):
    for part in ("particlax", "tests", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / file
    text = path.read_text().replace("__all__ = [", f'__all__ = [\n    "{name}",', 1)
    path.write_text(f"{text}\n\n{code}")
    tests = run(
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/test_contracts.py",
        "-k",
        name,
        cwd=tmp_path,
    )
    passed = re.search(r"(\d+) passed", tests.stdout)
    assert tests.returncode == 0, tests.stdout[-3000:] + tests.stderr[-1000:]
    assert passed, tests.stdout
    assert int(passed.group(1)) >= 5
    listing = run("docs/make_api.py", str(tmp_path / "api.md"), cwd=tmp_path)
    assert listing.returncode == 0, listing.stderr
    assert name in (tmp_path / "api.md").read_text()


def test_the_guide_has_a_kernel_and_a_diffusion():
    assert {file for file, _, _ in BLOCK.findall(GUIDE)} == {
        "particlax/kernels.py",
        "particlax/diffusions.py",
    }
