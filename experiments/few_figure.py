"""The figure of the few-particle study: the collapse of the variance, and its cure."""

from typing import Any

from experiments import report

CAPTION = (
    "Smallest and largest standard deviation over coordinates, divided by the target's, against the number of "
    "particles. SVGD and plain blob lose variance as dimension grows; calibration restores it on Gaussians and "
    "overshoots on skewed targets; the safeguarded form does not."
)

PANELS = (
    "Gaussian, D = 10",
    "Gaussian, D = 50",
    "log-gamma, D = 5",
    "Student t, D = 10",
    "garch",
    "eight_schools",
)
LINES = {
    ("svgd", "plain"): ("SVGD", "#8c6bb1", ":"),
    ("svgd", "Ensemble"): ("SVGD, Ensemble metric", "#8c6bb1", "-"),
    ("w_sgld_b", "Ensemble"): ("blob, Ensemble metric", "#d95f02", "-"),
    ("w_sgld_b", "calibrated"): ("blob, calibrated", "#1f78b4", "--"),
    ("w_sgld_b", "safeguarded"): ("blob, safeguarded", "#238b45", "-"),
}


def points(found: list[dict], target: str, sampler: str, how: str) -> dict[int, dict]:
    """Measures by number of particles."""
    return {
        r["config"]["M"]: r["metrics"]
        for r in found
        if r["metrics"]
        and (r["config"]["target"], r["config"]["sampler"], r["config"]["treatment"])
        == (target, sampler, how)
    }


def draw(found: list[dict]) -> Any:
    """Smallest and largest sd over the truth's against the number of particles, a panel for each target."""
    figure, axes = report.panels(2, 3, (11, 6.4), sharex=True, sharey=True)
    for axis, target in zip(axes.flat, PANELS, strict=True):
        axis.axhline(1, color="#bbbbbb", lw=1)
        for (sampler, how), (label, colour, style) in LINES.items():
            seen = points(found, target, sampler, how)
            nums = sorted(seen)
            low = [seen[num]["smallest sd"] for num in nums]
            high = [seen[num]["largest sd"] for num in nums]
            axis.fill_between(nums, low, high, color=colour, alpha=0.25, lw=0)
            axis.plot(nums, low, style, color=colour, marker="o", ms=3, label=label)
            axis.plot(nums, high, style, color=colour, marker="o", ms=3)
        axis.set_title(target, fontsize=10)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(0.1, 4)
        axis.set_xticks([20, 50, 100, 200], ["20", "50", "100", "200"], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_yticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"], minor=False)
        axis.set_yticks([], minor=True)
    for axis in axes[1]:
        axis.set_xlabel("particles")
    for axis in axes[:, 0]:
        axis.set_ylabel("sd over the true sd")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure
