"""What a run shows while it goes on."""

from typing import Any

from jaxtyping import Array
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from particlax.placement import here


class Bar:
    """The progress bar: share done, steps per second, time left, mean log density."""

    def __init__(self, steps: int, shown: bool, done: int = 0):
        self.before = done
        self.bar = Progress(
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            disable=not shown,
        )
        self.task = self.bar.add_task("", total=steps, completed=done, rate="", note="")

    def __enter__(self) -> "Bar":
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def update(self, done: int, seconds: float, log_density: Array) -> None:
        if not self.bar.disable:
            # What this process has: a mean over all would wait for processes that show no bar.
            note = f"mean log density {float(here(log_density).mean()):.4g}"
            rate = f"{(done - self.before) / seconds:.0f}/s"
            self.bar.update(self.task, completed=done, rate=rate, note=note)
