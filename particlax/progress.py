"""What a run shows while it goes on."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


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
            note = f"mean log density {float(jnp.mean(log_density)):.4g}"
            rate = f"{(done - self.before) / seconds:.0f}/s"
            self.bar.update(self.task, completed=done, rate=rate, note=note)
