"""Tables and the figure of the logistic regression study, from its records."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments import report

REFERENCE = "posterior (Laplace)"
NEAR = 0.005
"""Half a point of accuracy: how near the plateau counts as there."""
PAPER = {"SVGD": "", "w-SGLD": "slightly faster than SVGD", "w-SGLD-B": "slightly faster than SVGD"}
COLOURS = {
    "SVGD": "#8c6bb1",
    "w-SGLD": "#d95f02",
    "w-SGLD-B": "#e6ab02",
    "pi-SGLD": "#a6761d",
    "SGLD": "#888888",
    "SVGD, Ensemble": "#1f78b4",
    "w-SGLD-B, Ensemble": "#66c2a5",
    "px.calibrated": "#238b45",
}


def methods(found: list[dict]) -> list[str]:
    """The methods in the order in which they were run."""
    return list(dict.fromkeys(r["config"]["method"] for r in found))


def curves(found: list[dict], method: str) -> list[list[dict]]:
    """The records of each run of a method, by step."""
    here = [r for r in found if r["config"]["method"] == method]
    runs = [[r for r in here if r["seed"] == seed] for seed in sorted({r["seed"] for r in here})]
    return [sorted(run, key=lambda r: r["metrics"]["step"]) for run in runs]


def arrivals(found: list[dict], method: str) -> list[dict[str, float]]:
    """Of each run: step and seconds of the first evaluation near the posterior's accuracy, and from when it stayed."""
    goal = {r["seed"]: r["metrics"]["accuracy"] - NEAR for r in found if _is_reference(r)}
    seen = []
    for run in curves(found, method):
        there = [r["metrics"]["accuracy"] >= goal[r["seed"]] for r in run]
        first = there.index(True) if True in there else None
        stays = len(there) - there[::-1].index(False) if False in there else 0
        value = lambda place, key, run=run: (
            np.inf
            if place is None or place >= len(run)
            else run[place]["metrics"]["step"] if key == "step" else run[place]["seconds"]
        )  # fmt: skip
        seen.append({
            "first": value(first, "step"), "seconds": value(first, "seconds"),
            "stays": value(stays, "step"),
        })  # fmt: skip
    return seen


def _is_reference(record: dict) -> bool:
    return record["config"]["method"] == REFERENCE


def spread(values: Iterable[float], digits: int) -> str:
    """Mean and standard deviation."""
    some = np.asarray(list(values), float)
    return f"{some.mean():.{digits}f} ±{some.std():.{digits}f}"


def deciles(metrics: list[dict]) -> str:
    """Median sd ratio over the weights, with the first and the last decile."""
    low, mid, high = (np.mean([m[key] for m in metrics]) for key in ("sd_low", "sd", "sd_high"))
    return f"{mid:.2f} ({low:.2f} to {high:.2f})"


def middle(values: Iterable[float], digits: int = 0) -> str:
    """Median and range; a run that never got there counts as infinite."""
    some = np.sort(np.asarray(list(values), float))
    word = lambda v: f"{v:.{digits}f}" if np.isfinite(v) else "never"
    if some[0] == some[-1]:
        return word(some[0])
    return f"{word(np.median(some))} ({word(some[0])} to {word(some[-1])})"


def plateau(found: list[dict]) -> report.Rows:
    """Where every method ends: accuracy, log-likelihood, and how its cloud compares with the posterior."""
    rows = [["method", "paper", "accuracy, %", "log-likelihood", "sd / posterior sd (deciles)",
             "error of the mean, sd", "injected / gradient noise"]]  # fmt: skip
    for method in methods(found):
        last = [run[-1]["metrics"] for run in curves(found, method)]
        noise = "-"
        if "noise" in last[0]:
            share = np.mean([m["noise_above"] for m in last])
            noise = (
                f"{np.median([m['noise'] for m in last]):.2g}; above 1 for {share:.0%} of weights"
            )
        rows.append([
            method, "same level" if method in PAPER else "not shown", spread((100 * m["accuracy"] for m in last), 2),
            spread((m["log_likelihood"] for m in last), 4),
            deciles(last),
            f"{np.mean([m['mean_error'] for m in last]):.1f}", noise,
        ])  # fmt: skip
    return rows


def speed(found: list[dict]) -> report.Rows:
    """When every method comes within half a point of the posterior's accuracy."""
    rows = [["method", "paper", "iterations until first there", "iterations until there for good",
             "seconds until first there", "ms a step"]]  # fmt: skip
    for method in [m for m in methods(found) if m != REFERENCE]:
        seen = arrivals(found, method)
        last = [run[-1] for run in curves(found, method)]
        cost = np.median([1000 * r["seconds"] / r["metrics"]["step"] for r in last])
        rows.append([
            method, PAPER.get(method, "not shown"), middle(a["first"] for a in seen),
            middle(a["stays"] for a in seen), middle((a["seconds"] for a in seen), 2), f"{cost:.2f}",
        ])  # fmt: skip
    return rows


def subset(found: list[dict]) -> report.Rows:
    """On few rows, exact sampling beside the flows."""
    rows = [
        [
            "method",
            "accuracy, %",
            "log-likelihood",
            "sd / posterior sd (deciles)",
            "error of the mean, sd",
            "notes",
        ]
    ]
    for method in methods(found):
        here = [r for r in found if r["config"]["method"] == method]
        seen = [r["metrics"] for r in here]
        notes = "; ".join(dict.fromkeys(r.get("notes", "") for r in here))
        rows.append([
            method, spread((100 * m["accuracy"] for m in seen), 2),
            spread((m["log_likelihood"] for m in seen), 4),
            deciles(seen),
            f"{np.mean([m['mean_error'] for m in seen]):.2f}", notes,
        ])  # fmt: skip
    return rows


CAPTION = (
    "Test accuracy and log-likelihood on Covertype against iterations and seconds (without compilation; one minibatch of "
    "50 an iteration). Lines are means over runs, bands are one standard deviation. The grey line is the "
    "posterior itself; the grey band is half a point around its accuracy. The curves of SVGD, w-SGLD, w-SGLD-B and "
    "pi-SGLD lie on each other."
)


def draw(found: list[dict]) -> Any:
    """Accuracy and log-likelihood (rows) against iterations and seconds (columns)."""
    figure, axes = report.panels(2, 2, (11, 7.5), sharey="row", sharex="col")
    posterior = [r["metrics"] for r in found if _is_reference(r)]
    labels = {"accuracy": "test accuracy", "log_likelihood": "test log-likelihood"}
    limits = {"accuracy": (0.62, 0.77), "log_likelihood": (-0.66, -0.505)}
    for row, key in zip(axes, labels, strict=True):
        level = np.mean([m[key] for m in posterior])
        for place, axis in enumerate(row):
            axis.axhline(level, color="#999999", lw=1)
            if key == "accuracy":
                axis.axhspan(level - NEAR, level + NEAR, color="#000000", alpha=0.08, lw=0)
            for method in [m for m in methods(found) if m != REFERENCE]:
                runs = curves(found, method)
                steps = [r["metrics"]["step"] for r in runs[0]]
                seconds = np.median([[r["seconds"] for r in run] for run in runs], axis=0)
                values = np.array([[r["metrics"][key] for r in run] for run in runs])
                along, colour = seconds if place else steps, COLOURS.get(method)
                mean, sd = values.mean(0), values.std(0)
                axis.fill_between(along, mean - sd, mean + sd, color=colour, alpha=0.12, lw=0)
                axis.plot(along, mean, color=colour, lw=1.6, label=method)
            axis.set_xscale("log")
            axis.set_ylim(*limits[key])
        row[0].set_ylabel(labels[key])
    axes[1, 0].set_xlabel("iterations")
    axes[1, 1].set_xlabel("seconds")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=8, frameon=False, fontsize=9)
    return figure
