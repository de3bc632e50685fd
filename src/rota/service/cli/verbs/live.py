"""The live line of a job on a terminal: while it has no output, where it is, why, since when, and what changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import IO, TYPE_CHECKING, Self

from rota.service.cli.output import Terminal
from rota.service.cli.shell import err_draws_in_place, width
from rota.service.cli.verbs.formatting import age, clock_time, lasting
from rota.service.user_process import monotonic
from rota.spec.errors import NotReachable, RotaError
from rota.spec.resources import counted
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.client import Client
    from rota.service.models.jobs import JobDocument
    from rota.service.models.reasons import Explanation

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAMES_ASCII = "|/-\\"
ERASE = "\r\x1b[K"
DRAW_S, LOOK_S, EXPLAIN_S = 0.1, 0.5, 3.0
"""Pauses between two drawings of the line, two looks at the job, and two explanations, which cost the service more."""


class LiveLine:
    """The last line of a terminal, drawn again in place. It writes nothing where ``live`` is False."""

    def __init__(self, out: IO[str], *, live: bool) -> None:
        self._out, self._live = out, live
        self._lock = threading.RLock()
        self._drawn = False
        self._frames = cycle(FRAMES if "utf" in str(getattr(out, "encoding", "")).lower() else FRAMES_ASCII)

    def draw(self, text: str) -> None:
        """Show this text in place of the one before, cut to the width of the terminal; nothing for an empty one."""
        if not self._live:
            return
        with self._lock:
            if not text:
                self.clear()
                return
            self._write(f"{ERASE}{next(self._frames)} {text}"[: len(ERASE) + width() - 1])
            self._drawn = True

    def clear(self) -> None:
        """Take the line away."""
        with self._lock:
            if self._drawn:
                self._write(ERASE)
                self._drawn = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Without the line meanwhile: what is printed takes its place, and the next drawing comes below."""
        with self._lock:
            self.clear()
            yield

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._out.write(text)
            self._out.flush()


def live_line(terminal: Terminal) -> LiveLine:
    """The live line of a verb: on stderr, if that is a terminal and neither --json nor --quiet was given."""
    return LiveLine(terminal.err, live=err_draws_in_place() and not terminal.json and not terminal.quiet)


class Ticker:
    """Draws what ``text`` returns until its block is left, in a thread of its own."""

    def __init__(self, line: LiveLine, text: Callable[[], str]) -> None:
        self.line, self._text = line, text
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=DRAW_S * 10)  # it may wait for an answer; then it is left to the end of the process
        self.line.clear()

    def _run(self) -> None:
        while not self._over.wait(DRAW_S):
            text = self._text()
            if not self._over.is_set():
                self.line.draw(text)


def elapsed(text: str) -> Callable[[], str]:
    """``text`` with the seconds since now: for a wait without steps of its own."""
    began_s = monotonic()
    return lambda: f"{text} {lasting(monotonic() - began_s)}"


class JobWatch:
    """The text of a job's live line, asked for anew every ``LOOK_S``; empty once the job runs with output, or ended.

    ``spoke`` is set by who shows its output.
    """

    def __init__(self, client: Client, job: str) -> None:
        self._client, self._job = client, job
        self._found: JobDocument | None = None
        self._explained: Explanation | None = None
        self._ahead_before: int | None = None
        self._look_at_s = self._explain_at_s = 0.0
        self._trouble = ""
        self.spoke = False

    def __call__(self) -> str:
        """The present text."""
        if monotonic() >= self._look_at_s:
            self._look()
        if self._trouble or self._found is None:
            return self._trouble
        if self.spoke and self._found["state"] == JobState.RUNNING:
            return ""
        return waiting_text(self._found, self._explained, ahead_before=self._ahead_before)

    def _look(self) -> None:
        try:
            self._found = self._client.job(self._job)
            if self._found["state"] != JobState.QUEUED:
                self._explained = None
            elif monotonic() >= self._explain_at_s:
                self._explain()
            self._trouble = ""
        except NotReachable:
            self._trouble = f"{self._job}: the service does not answer; trying again"
        except RotaError as error:
            self._trouble = f"{self._job}: {error.message}"
        self._look_at_s = monotonic() + LOOK_S

    def _explain(self) -> None:
        before = None if self._explained is None else self._explained["ahead"]["jobs"]
        self._explained = self._client.explain(self._job)
        if before is not None and before != self._explained["ahead"]["jobs"]:
            self._ahead_before = before
        self._explain_at_s = monotonic() + EXPLAIN_S


def waiting_text(job: JobDocument, explained: Explanation | None, *, ahead_before: int | None = None) -> str:
    """State, since when, reason or step, place in the queue (and the one before), estimated start; empty at its end."""
    state = JobState(job["state"])
    if state.terminal:
        return ""
    parts = [f"{job['id']} {job['state']} {age(job['since'])}"]
    why = (explained or {}).get("why") or {}
    if state is JobState.QUEUED:
        parts.append(str(why.get("text") or job["text"] or ""))
    else:
        parts += [job["phase"], job["text"] if state is not JobState.RECOVERING else ""]
    if explained is not None and explained["waiting"]:
        ahead = explained["ahead"]["jobs"]
        was = f" (was {ahead_before})" if ahead_before is not None and ahead_before != ahead else ""
        parts.append(f"{counted(ahead, 'job')} ahead{was}" if ahead or was else "")
        estimate = explained["estimate"]
        if estimate is not None and estimate["p50"]:
            parts.append(f"starts about {clock_time(estimate['p50'])}")
    return " · ".join(part.rstrip(".") for part in parts if part)
