"""The part of a run that saves it: resume, save when due, answer signals, and name the last good checkpoint."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from particlax import placement
from particlax.begun import Begun, fresh
from particlax.checkpoints import (
    EXIT_SAVED,
    Checkpoints,
    Interrupted,
    newest_good,
    refuse_misfit,
    say,
    seconds,
    values,
)
from particlax.engine import Replaced, copy
from particlax.errors import CheckpointError, DataError, LostError, NonFiniteError
from particlax.fingerprint import differences
from particlax.flow import State
from particlax.folder import DamagedError, Folder
from particlax.placement import Layout
from particlax.processes import Team
from particlax.signals import Signals
from particlax.store import Store, read


class Saver:
    """A run with checkpoints, as a context: it holds the folder's lock and the handlers of signals."""

    def __init__(self, options: Checkpoints, layout: Layout | None = None):
        self.options, self.layout = options, layout
        self.team = Team() if layout is None else layout.team
        self.folder = Folder(options.folder)
        self.signals = Signals()
        timed = isinstance(options.every, str)
        self.steps = 0 if timed else int(options.every)
        self.interval = seconds(str(options.every)) if timed else np.inf
        self.store: Store | None = None
        self.saved = self.last = self.began = -1
        self.config: dict[str, str] = {}
        self.known: dict[int, float] = {}

    def __enter__(self) -> "Saver":
        holder = self.team.by_first(self.folder.lock)
        try:
            if self.team.several:
                self.team.each(lambda: self.folder.find(holder))
            self.store = Store(self.folder, self.team)
        except BaseException:
            self.folder.unlock()
            raise
        self.signals.start()
        self.mark = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self.store is not None
        try:
            if error is None:
                self.store.wait()
            elif not isinstance(error, LostError):  # Orbax would wait for the lost process
                self.store.settle()
        except CheckpointError as failure:
            if error is None:
                raise
            say(str(failure))  # the error on its way out is the one to see
        finally:
            if not isinstance(error, LostError):
                self.store.close()
            self.folder.unlock()
            self.signals.stop()
        unheard = error is None or (
            isinstance(error, Exception) and not isinstance(error, LostError)
        )
        if unheard and self.signals.came is not None:
            self._heard(self.signals.came, error)

    def _heard(self, came: int, error: BaseException | None) -> None:
        """Answer a signal that came too late to end the run, or while an error did."""
        if came == signal.SIGTERM and signal.getsignal(came) == signal.SIG_DFL:
            how = "finished" if error is None else f"ended by {type(error).__name__} ({error})"
            self._say(f"told to end (SIGTERM): the run is {how} and saved: {self._last()}")
            raise SystemExit(EXIT_SAVED)
        signal.raise_signal(came)

    # Going on

    def begin(
        self, config: Callable[[], dict[str, str]], state: State, last: int, *, watched: bool
    ) -> Begun:
        """The state of the last good checkpoint, or `state`, the beginning, if there is none.

        A run that an observer has ended goes on if it is asked for more steps than before, or if nobody watches.
        """
        self.config, begun, self.last = config(), fresh(state, self.layout), last
        self.began = int(state.step)
        step = self.team.by_first(self._newest)
        if step is None:
            return begun
        like = {"log_density": begun.log_density, "state": state}
        self.team.each(lambda: self._refuse_others(step, int(state.step), last, like))
        manifest = self.folder.manifest(step)
        leaves = read(self.folder, step, manifest["leaves"], jax.tree.leaves(like), self.team)
        # Copied: arrays made from files cannot always be donated, and would be held twice.
        tree = copy(jax.tree.unflatten(jax.tree.structure(like), leaves))
        tree["state"] = placement.put(self.layout, tree["state"])  # leaves without elements, too
        if self.layout is None:  # the step number and its like are read to the first device
            home = jax.tree.leaves(state.particles)[0].sharding
            tree = jax.tree.map(
                lambda a: jax.device_put(a, placement.beside(a.sharding, home)), tree
            )
        self.team.by_first(lambda: self._set_aside_after(step))
        self.saved = step
        if self.options.best is not None:
            self.team.by_first(self._find_best)  # which alone keeps account
        replaced = [Replaced(*entry) for entry in manifest["replaced"]]
        stopped = manifest["stopped"] and watched and last <= manifest.get("last", last)
        ended = step >= last or stopped
        verb = "finished" if ended else "resuming"
        where = f"{':' if ended else ' from'} {self.folder.home(step)}"
        self._say(f"{verb} at step {step} of {last}{where}")
        observed = manifest.get("observed", True)
        rest = (replaced, manifest["position"], stopped, observed)
        return Begun(tree["state"], tree["log_density"], *rest)

    def _find_best(self) -> None:
        """Note what `best` gave, by step, after the best of all was seen to be whole: another takes the place of a damaged one."""
        self.known = values(self.folder)
        while self.known:
            best = self._best()
            try:
                self.folder.verify(best)
                return
            except DamagedError as damage:
                self._say(f"{self.folder.home(best)}, the best so far, is damaged: {damage}")
                self.folder.set_aside(best)
                del self.known[best]

    def _best(self) -> int:
        return max(self.known, key=lambda old: (self.known[old], old))

    def _newest(self) -> int | None:
        return newest_good(self.folder)[0] if self.folder.steps() else None

    def _set_aside_after(self, step: int) -> None:
        for later in self.folder.steps():
            if later > step:
                self.folder.set_aside(later)

    def _say(self, line: str) -> None:
        if self.team.first:
            say(line)

    def _refuse_others(self, step: int, first: int, last: int, like: Any) -> None:
        """Refuse a checkpoint that is of another run, by its manifest."""
        try:
            manifest = self.folder.manifest(step)
        except DamagedError as damage:
            raise CheckpointError(
                f"the first process found {self.folder.home(step)}, but here {damage}; expected one folder, on a disk that all "
                "machines share"
            ) from None
        self._refuse_other_runs(step, manifest, first, last)
        refuse_misfit(self.folder.path, manifest, like)

    def _refuse_other_runs(
        self, step: int, manifest: dict[str, Any], first: int, last: int
    ) -> None:
        there = {f"version of {name}": v for name, v in manifest["versions"].items()}
        here = {f"version of {name}": v for name, v in _versions().items()}
        lines = differences(there | manifest["config"], here | self.config)
        if lines and self.options.strict:
            listed = "".join(f"\n  {line}" for line in lines)
            name = self.options.folder
            raise CheckpointError(
                f"the checkpoints in {name} are of another run:{listed}\nUse another folder, or the settings of that run. To go on "
                f"in spite of the differences, use px.Checkpoints({name!r}, strict=False)"
            )
        if not first <= step <= last:
            raise CheckpointError(
                f"{self.folder.home(step)} is at step {step}, but this run goes from step {first} to {last}; use another folder, or "
                f"steps={step - first if step > last else last - first} or more from an earlier start"
            )

    # Saving

    def room(self, step: int) -> int:
        """How many steps there are before the next look that must save."""
        return self.steps - step % self.steps if self.steps else 1 << 30

    def look(self, begun: Begun, *, end: bool, snapshot: Callable[[], Any]) -> None:
        """Save if it is time to, if the run ends or if a signal came; answer the signal."""
        step, late = int(begun.state.step), time.perf_counter() - self.mark > self.interval
        # The first process has the clock; a signal to one is a signal to all.
        notes = self.team.each(lambda: [late, self.signals.came])
        late, came = notes[0][0], next((came for _, came in notes if came is not None), None)
        on_time = bool(self.steps) and step % self.steps == 0
        due = (on_time or late) and step != self.began  # data may be slow to come
        if step != self.saved and (due or end or came is not None):
            self._save(begun, step, snapshot)
        if came is not None and not end:
            self._waited(begun.state)
            self._answer(came, begun.state)
        if end:
            self._waited(begun.state)

    def rescue(self, error: BaseException, begun: Begun) -> None:
        """Save where the run was when its data or an observer raised `error`, which is told where."""
        assert self.store is not None
        step = int(begun.state.step)
        try:
            self.store.settle()
        except CheckpointError as failure:  # of the save before
            self._say(str(failure))
            self.saved = -1
        note = f"The state of step {step} is saved in {self.folder.home(step)}; the same command goes on from there"
        try:
            if step != self.saved:
                self._save(begun, step, None)
            self._waited(begun.state)
        except CheckpointError as failure:
            note = str(failure)
            with contextlib.suppress(Exception):
                error.state = failure.state  # pyright: ignore
        if isinstance(error, DataError):
            note += f", with mended arrays by px.Checkpoints({str(self.options.folder)!r}, strict=False)"
        with contextlib.suppress(Exception):  # some errors cannot be changed
            error.add_note(f"{note}.")

    def seen(self, begun: Begun, snapshot: Callable[[], Any]) -> None:
        """Note of a state that was saved when an observer raised what observers, and `best`, say of it now."""
        step, value = int(begun.state.step), self._value(begun, snapshot)
        now = {"observed": True, "stopped": begun.stopped, "value": value}
        self.team.by_first(lambda: self.folder.amend(step, now))
        if value is not None and self.team.first:
            self.known[step] = value

    def _value(self, begun: Begun, snapshot: Callable[[], Any]) -> float | None:
        """What `best` says; if it raises, the state is saved without."""
        if self.options.best is None:
            return None
        try:
            value = float(self.options.best(snapshot()))
        except Exception as error:
            if not self.team.several:
                self.rescue(error, begun)
            raise
        return value if np.isfinite(value) else None

    def _save(self, begun: Begun, step: int, snapshot: Callable[[], Any] | None) -> None:
        assert self.store is not None
        value = None if snapshot is None else self._value(begun, snapshot)
        content = {
            "config": self.config,
            "versions": _versions(),
            "value": value,
            "replaced": [list(entry) for entry in begun.replaced],
            "position": begun.position,
            "stopped": begun.stopped,
            "observed": begun.observed,
            "last": self.last,
        }
        # A copy: the run donates the state's buffers while they are still being written.
        tree = copy({"log_density": begun.log_density, "state": begun.state})
        self.mark = time.perf_counter()
        try:
            self.store.save(step, tree, content, lambda: self._kept(step, value))
        except CheckpointError as error:
            raise self._told(error, begun.state) from error.__cause__
        self.saved = step

    def _kept(self, step: int, value: float | None) -> None:
        """When a checkpoint is complete: remove those that are neither among the last nor the best."""
        if value is not None:
            self.known[step] = value
        keep = set(self.folder.steps()[-self.options.keep :])
        if self.known:
            keep.add(self._best())
        self.folder.prune(keep)
        self.known = {old: v for old, v in self.known.items() if old in keep}

    def _waited(self, state: State) -> None:
        assert self.store is not None
        try:
            self.store.wait()
        except CheckpointError as error:
            raise self._told(error, state) from error.__cause__

    def _told(self, error: CheckpointError, state: State) -> CheckpointError:
        last = self._last()
        good = f"The last good one is {last}" if last else "There is none from before"
        full = any(words in str(error) for words in ("No space", "too large", "quota"))
        return CheckpointError(
            f"{error}. {good}; the state of step {int(state.step)} is in this error's .state. {'Make room' if full else 'Mend that'}, and "
            "run the same command again",
            state=copy(state),
        )

    def _last(self) -> str | None:
        steps = self.folder.steps()
        return str(self.folder.home(steps[-1])) if steps else None

    def explained(self, error: NonFiniteError) -> NonFiniteError:
        """The error with the last good checkpoint."""
        assert self.store is not None
        try:
            self.store.wait()
        except CheckpointError as failure:
            self._say(str(failure))
        error.checkpoint = self._last()
        where = f"The last good checkpoint is {error.checkpoint}"
        error.args = (f"{error}. {where if error.checkpoint else 'There is no checkpoint yet'}",)
        return error

    def again(self) -> str:
        """How to go on after another process was lost."""
        where = f"Run the same command again in all processes to go on from the last good checkpoint in {self.folder.path}"
        return (
            where
            if self._last()
            else "Run the same command again in all processes; there is no checkpoint yet"
        )

    def _answer(self, came: int, state: State) -> None:
        path = self.folder.home(int(state.step))
        again = f"saved step {int(state.step)} to {path}; run the same command again to go on"
        if came == signal.SIGTERM:
            self._say(f"told to end (SIGTERM): {again}")
            raise SystemExit(EXIT_SAVED)
        raise Interrupted(f"interrupted: {again}", state=copy(state), checkpoint=str(path))


def _versions() -> dict[str, str]:
    return {"particlax": sys.modules["particlax"].__version__, "jax": jax.__version__}
