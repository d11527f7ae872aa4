"""SIGTERM and Ctrl-C, noted while a run goes on and answered between its chunks of steps."""

import signal
import threading
from typing import Any

__all__ = ["Signals"]


class Signals:
    """Notes SIGTERM and Ctrl-C for the run to read between chunks; the second Ctrl-C counts at once."""

    def __init__(self) -> None:
        self.came: int | None = None
        self.old: dict[int, Any] = {}

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # A job in the background ignores Ctrl-C, which is meant for another.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.old[number] = signal.signal(number, self._note) or signal.SIG_DFL

    def stop(self) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)
        self.old = {}

    def _note(self, number: int, frame: Any) -> None:
        if self.came == number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if self.came != signal.SIGTERM:  # whoever said that waits for its exit code
            self.came = number
