"""The table of the MNIST study, from its records."""

from collections.abc import Iterator

import numpy as np

from experiments import report

PAPER = {
    400: {"pi-SGLD": 1.36, "w-SGLD": 1.44, "SVGD": 1.53, "SGLD": 1.64, "RMSprop": 1.59, "SGD": 1.72, "SGD, dropout": 1.51},
    800: {"pi-SGLD": 1.30, "w-SGLD": 1.37, "SVGD": 1.40, "SGLD": 1.41, "RMSprop": 1.43, "SGD": 1.47, "SGD, dropout": 1.33},
}  # fmt: skip
SCORES = ("error", "single_error", "single_sd", "nll", "ece", "auroc")
POINT = ("SGD", "RMSprop", "Adam", "SGD, dropout", "RMSprop, dropout")
METHODS = (*POINT[:3], "SGLD", "SVGD", "w-SGLD", "w-SGLD-B", "pi-SGLD", *POINT[3:], "SVGD, dropout", "w-SGLD-B, dropout")  # fmt: skip


def table(found: list[dict], width: int) -> report.Rows:
    """By method: the paper's error, ours for the mixture and for single networks, and the mixture's other scores."""
    rows = [
        ["method", "seeds", "paper, error %", "mixture, error %", "with snapshots, error %", "single networks, error %", "NLL", "ECE", "AUROC, clothes"]
    ]  # fmt: skip
    last = [r for r in found if r["evaluation"][0] == r["evaluation"][1]]
    tested = [r for r in last if r["config"]["data"] != "validation"]
    here = [r for r in tested if r["config"]["width"] == width]
    for method, label, seen in _rows(here):
        mean = {key: np.mean([m[key] for m in seen]) for key in SCORES}
        spread = f" ±{np.std([m['error'] for m in seen]):.2f}" if len(seen) > 1 else ""
        kept = [m["snapshots_error"] for m in seen if "snapshots_error" in m]
        paper = PAPER.get(width, {}).get(method)
        single = " (single)" if method in POINT else ""
        what = " (ensemble)" if method in POINT else ""
        rows.append([
            label, str(len(seen)), "-" if paper is None else f"{paper:.2f}{single}",
            f"{mean['error']:.2f}{spread}{what}", f"{np.mean(kept):.2f} ({len(kept)} seed{'s' * (len(kept) > 1)})" if kept else "-",
            f"{mean['single_error']:.2f} ±{mean['single_sd']:.2f}", f"{mean['nll']:.4f}",
            f"{mean['ece']:.4f}", f"{mean['auroc']:.4f}",
        ])  # fmt: skip
    if all(row[4] == "-" for row in rows[1:]):  # older records have no snapshots
        return [row[:4] + row[5:] for row in rows]
    return rows


def _rows(here: list[dict]) -> Iterator[tuple[str, str, list[dict]]]:
    """Method, what to call it, metrics. SGLD with several steps has a row for each."""
    for method in METHODS:
        mine = [r for r in here if r["config"]["method"] == method]
        steps = sorted({r["config"]["sgld"] for r in mine}) if method == "SGLD" else []
        if len(steps) < 2:
            if mine:
                yield method, method, [r["metrics"] for r in mine]
            continue
        for step in steps:
            yield method, f"{method}, step {step:g}", [r["metrics"] for r in mine if r["config"]["sgld"] == step]  # fmt: skip
