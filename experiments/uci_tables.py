"""The tables of the UCI regression study, from its records."""

from collections.abc import Iterable

import numpy as np

from experiments import report

PUBLISHED = {
    "rmse": {
        "boston": (2.957, 0.099), "concrete": (5.324, 0.104), "energy": (1.374, 0.045),
        "kin8nm": (0.090, 0.001), "naval": (0.004, 0.000), "power": (4.033, 0.033),
        "protein": (4.606, 0.013), "wine_red": (0.609, 0.010), "yacht": (0.864, 0.052),
    },
    "ll": {
        "boston": (-2.504, 0.029), "concrete": (-3.082, 0.018), "energy": (-1.767, 0.024),
        "kin8nm": (0.984, 0.008), "naval": (4.089, 0.012), "power": (-2.815, 0.008),
        "protein": (-2.947, 0.003), "wine_red": (-0.925, 0.014), "yacht": (-1.225, 0.042),
    },
}  # fmt: skip
"""SVGD of Liu & Wang (2016), table 1: mean and standard error over the splits."""
ENSEMBLE, SINGLE = "ensemble", "single network"
UP = {"rmse": -1, "ll": 1}
"""Whether more is better."""
CLEAR = 2.0
"""Standard errors beyond which a difference counts as clear."""
ROUNDING = 0.0005
"""Half a unit of the last decimal published."""


def names(found: list[dict], key: str) -> list[str]:
    """Sets or methods on test rows, in the order in which they were run."""
    return list(dict.fromkeys(r["config"][key] for r in found if _tested(r)))


def _tested(record: dict) -> bool:
    return record["config"].get("part", "test") == "test"


def methods(found: list[dict]) -> list[str]:
    """The methods, after the single networks of which the ensemble consists."""
    seen = names(found, "method")
    return [SINGLE, *seen] if ENSEMBLE in seen else seen


def values(found: list[dict], name: str, method: str, metric: str) -> dict[int, float]:
    """By split: a method's score on a set; a single network's is the mean over the ensemble's."""
    one = method == SINGLE
    of, key = (ENSEMBLE, f"single_{metric}") if one else (method, metric)
    return {r["seed"]: r["metrics"][key] for r in picked(found, name, of)}


def picked(found: list[dict], name: str, method: str) -> list[dict]:
    """The records of a method on the test rows of a set."""
    wanted = (name, method)
    return [
        r for r in found if _tested(r) and (r["config"]["set"], r["config"]["method"]) == wanted
    ]


def average(some: Iterable[float]) -> tuple[float, float]:
    """Mean and its standard error over the splits; NaN for that of one split."""
    many = np.asarray(list(some), float)
    error = many.std(ddof=1) / np.sqrt(len(many)) if len(many) > 1 else np.nan
    return float(many.mean()), float(error)


def shown(pair: tuple[float, float], digits: int, sign: str = "") -> str:
    """A mean with its error."""
    return f"{pair[0]:{sign}.{digits}f} ±{pair[1]:.{digits}f}"


def decimals(name: str, metric: str) -> int:
    """How many digits a score is given with: those of the published one and, where it is small, more."""
    return {"kin8nm": 4, "naval": 5}.get(name, 3) if metric == "rmse" else 3


def scores(found: list[dict], metric: str) -> report.Rows:
    """By set: the published score, and mean and standard error of ours over the splits."""
    columns = methods(found)
    rows = [["set", "splits", "published SVGD", *columns]]
    for name in names(found, "set"):
        paper = PUBLISHED[metric].get(name)
        seen = {m: values(found, name, m, metric) for m in columns}
        num = max(len(one) for one in seen.values())
        digits = decimals(name, metric)
        cells = [shown(average(one.values()), digits) if one else "-" for one in seen.values()]
        rows.append([name, str(num), "-" if paper is None else shown(paper, 3), *cells])
    return rows


def pairs(found: list[dict], metric: str) -> report.Rows:
    """By set: each method minus the ensemble on the same splits, with the paired standard error; marked beyond two of them."""
    columns = [m for m in methods(found) if m != ENSEMBLE]
    rows = [["set", *columns]]
    for name in names(found, "set"):
        base = values(found, name, ENSEMBLE, metric)
        cells = []
        for method in columns:
            own = values(found, name, method, metric)
            both = sorted(own.keys() & base.keys())
            if not both:
                cells.append("-")
                continue
            gap = average(own[k] - base[k] for k in both)
            mark = _mark(gap, metric)
            cells.append(shown(gap, decimals(name, metric), "+") + mark)
        rows.append([name, *cells])
    return rows


def _mark(gap: tuple[float, float], metric: str) -> str:
    """Whether a difference is clear, and which way."""
    if not abs(gap[0]) > CLEAR * gap[1]:
        return ""
    return " better" if gap[0] * UP[metric] > 0 else " worse"


def verdict(
    ours: tuple[float, float], paper: tuple[float, float], metric: str
) -> tuple[bool, bool]:
    """Whether our mean is better than the published one, and whether the difference is clear.

    Clear is more than two standard errors of the difference and the half unit lost in printing three decimals.
    """
    gap = (ours[0] - paper[0]) * UP[metric]
    return gap > 0, abs(gap) > CLEAR * np.hypot(ours[1], paper[1]) + ROUNDING


def against(found: list[dict]) -> report.Rows:
    """By method: on how many sets the mean is better than the published one, and on which it is not."""
    rows = [["method", "RMSE better", "clearly", "RMSE not better on", "LL better", "clearly", "LL not better on"]]  # fmt: skip
    for method in methods(found):
        cells = []
        for metric in ("rmse", "ll"):
            seen = {}
            for name, paper in PUBLISHED[metric].items():
                if own := values(found, name, method, metric):
                    seen[name] = verdict(average(own.values()), paper, metric)
            good = [clear for better, clear in seen.values() if better]
            bad = [f"{n} (clearly)" if clear else n for n, (ok, clear) in seen.items() if not ok]
            cells += [f"{len(good)} of {len(seen)}", str(sum(good)), ", ".join(bad) or "none"]
        if any(name in PUBLISHED["rmse"] for name in names(found, "set")):
            rows.append([method, *cells])
    return rows


def insides(found: list[dict]) -> report.Rows:
    """By set and method: what the particles hold, how far they disagree, what tuning the noise does, coverage, seconds."""
    rows = [["set", "method", "lambda", "learned noise sd", "disagreement", "factor on the noise",
             "LL before the factor", "90 % interval covers", "seconds a run"]]  # fmt: skip
    for name in names(found, "set"):
        for method in names(found, "method"):
            here = picked(found, name, method)
            if not here:
                continue
            mean = {k: np.mean([r["metrics"][k] for r in here]) for k in here[0]["metrics"]}
            rows.append([
                name, method, f"{mean['lambda']:.3g}", f"{mean['noise']:.3g}", f"{mean['disagreement']:.3g}",
                f"{mean['factor']:.2f}", f"{mean['untuned_ll']:.3f}", f"{mean['coverage']:.1%}",
                f"{np.median([r['seconds'] for r in here]):.1f}",
            ])  # fmt: skip
    return rows


def validation(found: list[dict]) -> report.Rows:
    """By first step and slowness of log lambda: RMSE and log-likelihood on validation rows, means over the splits."""
    here = [r for r in found if not _tested(r)]
    sets = list(dict.fromkeys(r["config"]["set"] for r in here))
    rows = [["first step", "log lambda's share", *(f"{name}: RMSE, LL" for name in sets)]]
    for key in dict.fromkeys((r["config"]["step_size"], r["config"]["slow"]) for r in here):
        cells = []
        for name in sets:
            seen = [
                r["metrics"] for r in here
                if (r["config"]["set"], r["config"]["step_size"], r["config"]["slow"]) == (name, *key)
            ]  # fmt: skip
            mean = lambda metric, seen=seen: np.mean([m[metric] for m in seen])
            digits = decimals(name, "rmse")
            cells.append(f"{mean('rmse'):.{digits}f}, {mean('ll'):.3f}" if seen else "-")
        rows.append([f"{key[0]:g}", f"{key[1]:g}", *cells])
    return rows
