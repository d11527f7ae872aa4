"""Write the API page: every public name of every module with its signature and docstring.

    python docs/make_api.py [path]        (default build/api.md)

Modules are walked in the order of the layers. Exit status 1, with the list, if a public name has no docstring.
"""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

LAYERS = [
    "errors",
    "checks",
    "noise",
    "particles",
    "gpu",
    "formula",
    "updates",
    "calls",
    "tensor",
    "direct",
    "skinny",
    "blocks",
    "fused",
    "radix",
    "selection",
    "circle",
    "processes",
    "placement",
    "sharding",
    "pairwise",
    "medians",
    "kernels",
    "priors",
    "target",
    "terms",
    "answers",
    "calibration",
    "diffusions",
    "metrics",
    "integrators",
    "flow",
    "algorithms",
    "schedules",
    "data",
    "ready",
    "streams",
    "outputs",
    "networks",
    "tracing",
    "signatures",
    "modules",
    "export",
    "programs",
    "engine",
    "history",
    "begun",
    "sources",
    "fingerprint",
    "folder",
    "heaps",
    "store",
    "checkpoints",
    "signals",
    "saver",
    "progress",
    "run",
    "zoo",
    "diagnostics",
    "sweep",
    "mixtures",
    "predictive",
    "modes",
    "evidence",
    "moves",
    "phases",
    "sample",
    "plots",
]


def public_modules() -> list[ModuleType]:
    """The modules with an `__all__`, lowest layer first; modules unknown to LAYERS come last."""
    package = importlib.import_module("particlax")
    found = [info.name for info in pkgutil.iter_modules(package.__path__)]
    ranked = sorted(found, key=lambda name: LAYERS.index(name) if name in LAYERS else len(LAYERS))
    modules = [importlib.import_module(f"particlax.{name}") for name in ranked]
    return [module for module in modules if hasattr(module, "__all__")]


def own_doc(name: str, value: Any) -> str:
    """The docstring written for `value` itself: not inherited, and not made by `dataclass`."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return "" if not doc or doc.startswith(f"{name}(") else inspect.cleandoc(doc)


def signature(name: str, value: Any) -> str:
    """How to call it; classes that are not built by users show their name alone."""
    if inspect.isclass(value) and (inspect.isabstract(value) or issubclass(value, BaseException)):
        return name
    try:
        return f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):
        return name


def entry(name: str, value: Any) -> str:
    """One name: signature, docstring (its examples as code)."""
    lines, inside = [], False
    for line in own_doc(name, value).splitlines():
        if line.startswith(">>>") and not inside:
            lines, inside = [*lines, "```python"], True
        elif inside and not line.strip():
            lines, inside = [*lines, "```"], False
        lines.append(line)
    if inside:
        lines.append("```")
    return "\n".join([f"### {name}", "", "```python", signature(name, value), "```", "", *lines])


def main(arguments: list[str]) -> int:
    """Write the page; the exit status."""
    if any(argument.startswith("-") for argument in arguments) or len(arguments) > 1:
        print("expected at most the path of the page, such as build/api.md", file=sys.stderr)
        return 2
    path = Path(arguments[0] if arguments else "build/api.md")
    pages, missing = ["# API of particlax"], []
    for module in public_modules():
        pages.append(f"## {module.__name__}\n\n{inspect.cleandoc(module.__doc__ or '')}")
        for name in module.__all__:
            value = getattr(module, name)
            if not own_doc(name, value):
                missing.append(f"{module.__name__}.{name}")
            pages.append(entry(name, value))
    if missing:
        print("no docstring:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(pages) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
