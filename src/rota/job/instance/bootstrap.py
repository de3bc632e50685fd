"""First code of a rank's process: stacks on demand, steps and collectives reported, errors to a file; then the script.

``python -m rota.job.instance.bootstrap SCRIPT ARGS...`` runs the script as ``__main__``, and ``-m MODULE ARGS...`` the
module, with ``sys.argv`` and the import path as if it had been started directly.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import runpy
import signal
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any

from rota.job.health.stacks import error_summary
from rota.job.rpc.tracing import own_collectives
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.environ import get

REPORT_S = 0.25
"""Between two looks at the place in the collectives: who waits for whom is read from them."""


class StepCounter:
    """Counts optimiser steps once the script has loaded torch; writes them, and the place in collectives, down."""

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, ""
        self._steps, self._hooked = 0, False

    def work(self) -> None:
        """Every ``REPORT_S``: hook the optimisers when they appear, write what changed."""
        while True:
            blocking_sleep(REPORT_S)
            self._look()

    def _look(self) -> None:
        optim = sys.modules.get("torch.optim.optimizer")
        if not self._hooked and hasattr(optim, "register_optimizer_step_post_hook"):
            optim.register_optimizer_step_post_hook(self._stepped)  # pyright: ignore[reportOptionalMemberAccess] - checked
            self._hooked = True
        place = own_collectives()
        activity = place.activity + len(sys.modules)
        if self._written != (text := f"{self._steps} {place.entered} {activity} {place.inside}"):
            self._written, fresh = text, self._path.with_name(f"new-{self._path.name}")
            with contextlib.suppress(OSError):  # the reader must not find half of it
                fresh.write_text(text)
                fresh.replace(self._path)

    def _stepped(self, *_: Any) -> None:
        self._steps += 1


def write_error(path: Path, error: BaseException) -> None:
    """The error file of torchelastic: message, traceback and time."""
    text, trace = error_summary(error)
    extra = {"py_callstack": trace, "timestamp": f"{SystemClock().wall_s():.6f}"}
    message = {"message": text, "extraInfo": extra}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"message": message}))


def main() -> None:
    """Prepare this process, then become the script."""
    faulthandler.enable()
    stacks = get("ROTA_STACKS_FILE")
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w") if stacks else sys.stderr)  # noqa: SIM115 - kept
    if progress := get("ROTA_PROGRESS_FILE"):
        threading.Thread(target=StepCounter(Path(progress)).work, name="rota-progress", daemon=True).start()
    if error_file := get("ROTA_ERROR_FILE"):
        show = sys.excepthook

        def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not Path(error_file).exists():
                write_error(Path(error_file), error)
            show(kind, error, trace)

        sys.excepthook = record
    become(sys.argv[1:])


def become(argv: list[str]) -> None:
    """Run a script, or ``-m MODULE``, in the one ``__main__`` of this process, as Python does: threads outlive it."""
    names = vars(sys.modules["__main__"])
    for name in names.keys() - {"__name__", "__builtins__"}:
        del names[name]
    if argv[0] == "-m":
        if len(argv) == 1:
            sys.exit("Argument expected for the -m option")
        sys.argv[:] = argv[1:]
        runpy._run_module_as_main(argv[1])  # pyright: ignore[reportAttributeAccessIssue] - python -m calls it
        return
    sys.argv[:] = argv
    script = Path(argv[0]).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(script.parent)
    loader = SourceFileLoader("__main__", str(script))
    names |= {"__file__": str(script), "__loader__": loader, "__spec__": None, "__package__": None, "__doc__": None}
    exec(loader.source_to_code(loader.get_data(str(script)), str(script)), names)  # noqa: S102 - the user's own script


if __name__ == "__main__":
    from rota.job.instance.bootstrap import main as start  # not this module, whose names the script replaces

    start()
