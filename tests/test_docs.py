"""The documentation is true: the API page lists every name, examples and guides run."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import particlax

ROOT = Path(particlax.__file__).parent.parent
MODULES = sorted(info.name for info in pkgutil.iter_modules(particlax.__path__))


@pytest.fixture
def make_api():
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_api_page_lists_every_public_name(make_api, tmp_path, capsys):
    path = tmp_path / "deep" / "api.md"
    assert make_api.main([str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    sections = dict(
        re.findall(r"^## particlax\.(\w+)\n(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S)
    )
    for name in MODULES:
        module = importlib.import_module(f"particlax.{name}")
        if not hasattr(module, "__all__"):
            assert name not in sections
            continue
        listed = re.findall(r"^### (\w+)$", sections[name], re.M)
        assert listed == list(module.__all__)
    assert "svgd(target" in sections["algorithms"]
    assert "Stein variational gradient descent" in sections["algorithms"]
    assert path.read_text().count("```") % 2 == 0


def test_api_page_follows_the_layers(make_api):
    names = [module.__name__.split(".")[1] for module in make_api.public_modules()]
    assert names.index("errors") < names.index("kernels") < names.index("flow") < names.index("run")
    assert set(MODULES) <= set(make_api.LAYERS), (
        "place the new module in LAYERS of docs/make_api.py"
    )


@pytest.mark.parametrize("kind", ["function", "class", "module"])
def test_api_page_refuses_names_without_docstring(make_api, tmp_path, monkeypatch, capsys, kind):
    def bare():
        pass

    class Silent(particlax.kernels.RBF):
        pass

    thing = {"function": bare, "class": Silent, "module": particlax.kernels.Kernel.__mro__[0]}[kind]
    if kind == "module":
        monkeypatch.setattr(thing, "__doc__", None)
        wanted = "Kernel"
    else:
        wanted = thing.__name__
        monkeypatch.setattr(particlax.kernels, wanted, thing, raising=False)
        monkeypatch.setattr(particlax.kernels, "__all__", [*particlax.kernels.__all__, wanted])
    path = tmp_path / "api.md"
    assert make_api.main([str(path)]) == 1
    assert f"particlax.kernels.{wanted}" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"particlax.{name}")
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    counts = {
        name: sum(
            len(test.examples) for test in finder.find(importlib.import_module(f"particlax.{name}"))
        )
        for name in MODULES
    }
    for name in (
        "algorithms",
        "kernels",
        "diffusions",
        "flow",
        "run",
        "zoo",
        "diagnostics",
        "data",
    ):
        assert counts[name] > 0, f"no example is found in particlax.{name}"


BLOCK = re.compile(r"(<!-- not run -->\s*\n)?^```python\n(.*?)^```", re.M | re.S)
GUIDES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    if not all(skipped for skipped, _ in BLOCK.findall(path.read_text()))
)


@pytest.mark.parametrize("path", GUIDES, ids=lambda p: p.name)
def test_guides_run(path, tmp_path, monkeypatch):
    """All python blocks of a file, in order, in one namespace; `<!-- not run -->` skips the next."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    text, space = path.read_text(), {"__name__": f"guide_{path.stem}"}
    for match in BLOCK.finditer(text):
        if match.group(1):
            continue
        line = text.count("\n", 0, match.start(2))
        code = "\n" * line + match.group(2)  # so that errors name the line of the guide
        exec(compile(code, str(path), "exec"), space)
    assert space.keys() > {"__name__", "__builtins__"}  # the guide has made something


def test_block_pattern():
    text = "a\n```python\nx = 1\n```\n<!-- not run -->\n```python\ny\n```\n```bash\nz\n```\n"
    found = [(bool(skip), code) for skip, code in BLOCK.findall(text)]
    assert found == [(False, "x = 1\n"), (True, "y\n")]
