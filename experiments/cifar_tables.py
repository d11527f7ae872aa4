"""The tables of the CIFAR-10 study, from its records."""

import numpy as np

from experiments import report

PAPER = {
    "pi-SGLD": (89.52, 25.06), "w-SGLD": (88.80, 31.26), "SVGD": (88.72, 30.57),
    "SGLD": (88.64, 28.52), "Adam": (86.76, 23.80),
}  # fmt: skip
POINT = ("SGD", "RMSprop", "Adam")
COLUMNS = [
    "method", "epochs", "paper, accuracy % (training loss)", "mixture, accuracy %", "single networks, accuracy %", "NLL", "Brier", "ECE",
    "training NLL, single", "ms a step", "memory, MiB",
]  # fmt: skip


def groups(found: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """The records by method and number of epochs, methods in their first order."""
    by: dict[tuple[str, int], list[dict]] = {}
    for entry in found:
        by.setdefault((label(entry["config"]), entry["config"]["epochs"]), []).append(entry)
    methods = list(dict.fromkeys(method for method, _ in by))
    order = sorted(by, key=lambda both: (methods.index(both[0]), both[1]))
    return {both: by[both] for both in order}


def label(config: dict) -> str:
    """The method, and which layers are particles if not all are."""
    part = config.get("bayesian", "")
    return f"{config['method']}, {part} alone" if part else config["method"]


def paper(method: str) -> str:
    """What the paper's table says of a method."""
    if method not in PAPER:
        return "-"
    accuracy, loss = PAPER[method]
    return f"{accuracy:.2f} ({loss:.2f}{'; one network' if method in POINT else ''})"


def table(found: list[dict]) -> report.Rows:
    """By method: the paper's accuracy, ours of the mixture and of single networks, and the mixture's other scores."""
    rows = [COLUMNS]
    last = [entry for entry in found if entry["evaluation"][0] == entry["evaluation"][1]]
    for (method, number), here in groups(last).items():
        seen = [entry["metrics"] for entry in here]
        mean = {key: float(np.mean([m[key] for m in seen])) for key in seen[0]}
        what = " (ensemble)" if method in POINT else ""
        rows.append([
            method, f"{number}", paper(method), f"{spread([m['accuracy'] for m in seen])}{what}",
            f"{mean['single_accuracy']:.2f} ±{mean['single_sd']:.2f}", f"{mean['nll']:.4f}", f"{mean['brier']:.4f}",
            f"{mean['ece']:.4f}", f"{mean['train_nll']:.4f}", f"{np.median([m['ms'] for m in seen]):.2f}",
            f"{max(m['peak_mib'] for m in seen):.0f}" if "peak_mib" in seen[0] else "-",
        ])  # fmt: skip
    return rows


def spread(values: list[float]) -> str:
    """The mean, and the sd over seeds where there are several."""
    return f"{np.mean(values):.2f}" + (f" ±{np.std(values):.2f}" if len(values) > 1 else "")


def epochs(found: list[dict]) -> report.Rows:
    """By method: the mixture's accuracy after each quarter of the run."""
    parts = max((entry["evaluation"][1] for entry in found), default=0)
    rows = [["method", "epochs", *(f"{place}/{parts}" for place in range(1, parts + 1))]]
    for (method, number), here in groups(found).items():
        by: dict[tuple[int, int], list[float]] = {}
        for entry in here:
            by.setdefault(tuple(entry["evaluation"]), []).append(entry["metrics"]["accuracy"])
        cells = [(place, parts) for place in range(1, parts + 1)]
        shown = [f"{np.mean(by[cell]):.2f}" if cell in by else "-" for cell in cells]
        rows.append([method, f"{number}", *shown])
    return rows
