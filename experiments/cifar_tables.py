"""The tables of the CIFAR-10 study, from its records."""

import numpy as np

from experiments import report

PAPER = {
    "pi-SGLD": (89.52, 25.06), "w-SGLD": (88.80, 31.26), "SVGD": (88.72, 30.57),
    "SGLD": (88.64, 28.52), "SGLD, cold": (88.64, 28.52), "Adam": (86.76, 23.80),
}  # fmt: skip
POINT = ("SGD", "RMSprop", "Adam")
METHODS = (*POINT, "SGLD", "SGLD, cold", "SVGD", "w-SGLD", "w-SGLD-B", "pi-SGLD", "pi-SGLD, blob")
VARIED = ("optimizer", "prior", "dropout", "schedule", "activation", "particles")
SCORES = ("single_accuracy", "single_sd", "nll", "brier", "ece", "train_nll")
COLUMNS = [
    "method", "epochs", "seeds", "paper, accuracy % (training loss)", "mixture, accuracy %", "single networks, accuracy %", "NLL", "Brier", "ECE",
    "training NLL, single",
]  # fmt: skip


def groups(found: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """The records by method and number of epochs: short runs first, and variants after all that have the usual settings."""
    usual = {key: most([repr(entry["config"].get(key)) for entry in found]) for key in VARIED}
    by: dict[tuple[str, int], list[dict]] = {}
    place: dict[tuple[str, int], tuple] = {}
    for entry in found:
        config = entry["config"]
        both = label(config, usual), config["epochs"]
        by.setdefault(both, []).append(entry)
        place[both] = (both[1], both[0] != config["method"], METHODS.index(config["method"]))
    return {both: by[both] for both in sorted(by, key=lambda both: place[both])}


def most(values: list[str]) -> str:
    """The most frequent one."""
    return max(values, key=values.count, default="")


def label(config: dict, usual: dict[str, str] | None = None) -> str:
    """The method, which layers are particles if not all are, and settings that most records do not have."""
    part = config.get("bayesian", "")
    others = [f"{k} {config[k]}" for k, v in (usual or {}).items() if repr(config.get(k)) != v]
    return ", ".join([config["method"], *([f"{part} alone"] if part else []), *others])


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
        mean = {key: float(np.mean([m[key] for m in seen])) for key in SCORES}
        what = " (ensemble)" if method in POINT else ""
        rows.append([
            method, f"{number}", f"{len(here)}", paper(method), f"{spread([m['accuracy'] for m in seen])}{what}",
            f"{mean['single_accuracy']:.2f} ±{mean['single_sd']:.2f}", f"{mean['nll']:.4f}", f"{mean['brier']:.4f}",
            f"{mean['ece']:.4f}", f"{mean['train_nll']:.4f}",
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


def times(found: list[dict]) -> report.Rows:
    """By method and layers: ms a step, beside Adam's, and memory."""
    rows = [["method", "ms a step", "of Adam's", "memory, MiB", "compilation, s", "device"]]
    base = [e["metrics"]["ms"] for e in found if label(e["config"]) == "Adam"]
    for entry in found:
        m = entry["metrics"]
        ratio = f"{m['ms'] / base[0]:.2f}" if base else "-"
        peak = f"{m['peak_mib']:.0f}" if "peak_mib" in m else "-"
        rows.append([label(entry["config"]), f"{m['ms']:.2f}", ratio, peak, f"{m['compile_s']:.0f}", entry["device"]])  # fmt: skip
    return rows
