"""Imports go one way, the top level is small, and optional packages are imported when used."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import particlax

PACKAGE = Path(particlax.__file__).parent
ROOT = PACKAGE.parent
ORDER = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["LAYERS"]
ONLY = {"schedules": {"errors", "checks"}}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports(path):
    """Every imported module of a file, absolute, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write imports in full"
            if node.module == "particlax":
                yield from (f"particlax.{alias.name}" for alias in node.names)
            else:
                yield node.module


def lower(module):
    """The modules of the package that `module` imports."""
    names = [n for n in imports(PACKAGE / f"{module}.py") if n.split(".")[0] == "particlax"]
    assert "particlax" not in names, f"{module} imports the whole package"
    return {name.split(".")[1] for name in names}


def test_every_module_has_a_layer():
    unknown = set(MODULES) - set(ORDER)
    assert not unknown, f"place {sorted(unknown)} in LAYERS of docs/make_api.py"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    place = ORDER.index(module)
    for other in lower(module):
        assert other in ORDER[:place], f"{module} imports {other}, which lies above it"
        assert other in ONLY.get(module, ORDER), f"{module} may not import {other}"


def test_this_test_sees_imports():
    assert {"errors", "kernels", "terms", "pairwise"} <= lower("diffusions")
    assert "export" in lower("run")  # inside a function


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_experiments_and_tests_are_never_imported(module):
    heads = {name.split(".")[0] for name in imports(PACKAGE / f"{module}.py")}
    assert not heads & {"experiments", "benchmarks", "tests", "docs"}


@pytest.mark.parametrize("module", MODULES)
def test_optional_packages_are_not_imported_at_module_level(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    heads = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            heads |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            heads.add((node.module or "").split(".")[0])
    assert not heads & {"matplotlib", "arviz", "scipy"}


def test_import_is_light():
    """No plotting, no ArviZ, no optimiser of SciPy, and no warning."""
    program = (
        "import sys, particlax; "
        "print([m for m in ('matplotlib', 'arviz', 'scipy.optimize', 'xarray', 'pandas') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_top_level_is_small_and_true():
    names = particlax.__all__
    assert len(names) <= 30
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(particlax, name)


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module):
    assert len((PACKAGE / f"{module}.py").read_text().splitlines()) < 400


def test_version_is_a_release_number():
    assert all(part.isdigit() for part in particlax.__version__.split("."))
