"""Stack dumps for people: the threads and tasks of this process that run code of the job, not those of Rota."""

from __future__ import annotations

import asyncio
import faulthandler
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from rota.spec.errors import RotaError
from rota.spec.reasons import Reason
from rota.spec.resources import counted

_FRAME = re.compile(r'^ +(?:File "(?P<file>[^"]+)", line \d+ in (?P<name>.+)|(?P<call>.+) \((?P<stacks_of>.+):\d+\))$')
"""A frame as faulthandler writes it, or py-spy."""
_THREAD = re.compile(r"^(?=(?:Thread|Current thread) )", re.MULTILINE)
_SPY_TITLE = re.compile(r"^(?:Process \d+: .*|Python v.*)\n", re.MULTILINE)
_PACKAGES = "/site-packages/"
_ROTA, _LIBRARY = str(Path(__file__).resolve().parents[2]), sysconfig.get_path("stdlib")
REMEDIES: Mapping[str, str] = dict.fromkeys(
    ("torch", "ray"), "it comes with the extra 'engine': pip install './[engine]' in the source folder"
)
TASKS_MAX = 20
DEPTH_MAX = 50


@lru_cache(1024)
def is_of_the_job(path: str) -> bool:
    """True for a file that is neither Rota's nor its engine's nor of Python's own library."""
    if path.startswith("<frozen") or _is_ours(path):
        return False
    return _PACKAGES in path or not path.startswith(_LIBRARY)


def place_in_job() -> str:
    """``FILE:LINE:COL`` of the innermost call in code of the job; empty when none is on the stack of this thread."""
    frame = _frame_in_job()
    if frame is None:
        return ""
    line, _, col, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return f"{frame.f_code.co_filename}:{line}:{(col or 0) + 1}"


def line_in_job() -> tuple[str, int]:
    """File and line of the innermost call in code of the job; ("", 0) when none is on the stack of this thread."""
    frame = _frame_in_job()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _frame_in_job() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage] - inspect.stack reads every file
    while frame is not None and not is_of_the_job(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def own_reason(error: BaseException) -> Reason | None:
    """The reason that Rota gave an error; some of Python's have a ``reason`` too, and mean something else by it."""
    found = getattr(error, "reason", None)
    return Reason(found) if isinstance(found, str) and found in Reason.__members__ else None


def error_summary(error: BaseException) -> tuple[str, str]:
    """What was raised in one line, with what to do about it where that is known, and its traceback.

    Its frames begin with the first of the job. What Rota says on purpose has those of the job alone, or no traceback.
    """
    said = error.message if isinstance(error, RotaError) else error
    text, full = f"{type(error).__name__}: {said}", traceback.TracebackException.from_exception(error)
    on_purpose = isinstance(error, RotaError) or own_reason(error) is not None
    if isinstance(error, ModuleNotFoundError) and error.name:
        name = error.name.partition(".")[0]
        text += (
            f"; {REMEDIES.get(name) or f'put {name} beside the job file (workdir), or install it into {sys.prefix}'}"
        )
    elif isinstance(error, RotaError) and error.hint:
        text += f"; {error.hint}"
    seen, one = False, full
    while one is not None:
        own = _own(one.stack, alone=on_purpose or isinstance(error, ImportError))
        seen, one.stack = seen or bool(own), traceback.StackSummary.from_list(own or one.stack)
        one = one.__cause__ or one.__context__
    if seen or not (on_purpose or isinstance(error, ImportError | SyntaxError)):
        return text, "".join(full.format())
    return text, "" if on_purpose or isinstance(error, ImportError) else "".join(full.format_exception_only())


def _own(stack: traceback.StackSummary, *, alone: bool) -> list[traceback.FrameSummary]:
    """The frames from the first of the job on, or those of the job ``alone``; none where the job has none."""
    first = next((i for i, frame in enumerate(stack) if is_of_the_job(frame.filename)), len(stack))
    return [
        frame
        for frame in stack[first:]
        if is_of_the_job(frame.filename) or not (alone or frame.filename.startswith("<frozen"))
    ]


def of_the_job(text: str) -> str:
    """Of a dump of faulthandler or py-spy the threads with code of the job; all of it where there is none.

    Those with code outside of libraries come first; a thread of Rota or Ray that is in a library is then not the job's.
    The last line counts the threads that are left out. Of the frames those of the import system, of Python's and Rota's
    start of a script, and all but the innermost of a chain of imports in libraries are left out.
    """
    parts, last = _of_the_job(text)
    return "\n\n".join(part for part in (*parts, last) if part) if parts else text


def _of_the_job(text: str) -> tuple[list[str], str]:
    """What is shown of a dump, nothing where it has no code of the job; and in words how many threads are left out."""
    before, *threads = _THREAD.split(text)
    paths = {thread: _paths(thread) for thread in threads}
    mine = [thread for thread in threads if any(map(is_of_the_job, paths[thread]))]
    if own := [thread for thread in mine if any(map(_is_of_the_user, paths[thread]))]:
        mine = own + [thread for thread in mine if thread not in own and not any(map(_is_ours, paths[thread]))]
    left = len(threads) - len(mine)
    last = f"{counted(left, 'more thread')} of Rota, Ray and Python" if left else ""
    words = _SPY_TITLE.sub("", before).strip("\n")
    return [*([words] if words and mine else []), *map(_without_noise, mine)], last


def _is_ours(path: str) -> bool:
    return path.startswith(_ROTA) or f"{_PACKAGES}ray/" in path


def _is_of_the_user(path: str) -> bool:
    return is_of_the_job(path) and _PACKAGES not in path


def _paths(thread: str) -> list[str]:
    return [match["file"] or match["stacks_of"] for match in map(_FRAME.match, thread.splitlines()) if match]


def _without_noise(thread: str) -> str:
    title, *lines = thread.rstrip("\n").splitlines()
    kept: list[str] = []
    importing, outermost = False, 0
    for line in lines:
        match = _FRAME.match(line)
        path = "" if match is None else match["file"] or match["stacks_of"]
        if path.startswith("<frozen"):
            continue
        in_library = _PACKAGES in path and (match is not None and "<module>" in (match["name"], match["call"]))
        if in_library and importing:
            continue
        importing = importing or in_library
        kept.append(line.replace(path[: path.find(_PACKAGES) + len(_PACKAGES)], "") if _PACKAGES in path else line)
        outermost = len(kept) if match is not None and is_of_the_job(path) else outermost
    return "\n".join([title, *kept[:outermost]])


def own_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Threads of this process with code of the job, and what waits in its event loop ``loop``."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        threads = file.read()
    parts, last = _of_the_job(threads)
    parts += _waiting(loop) if loop is not None else ()
    return "\n\n".join([*parts, last]) if parts else threads


def _waiting(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    for task in list(asyncio.all_tasks(loop))[:TASKS_MAX]:
        frames = list(_frames(task.get_coro()))
        if any(is_of_the_job(frame.f_code.co_filename) for frame in frames):
            lines = (f'  File "{f.f_code.co_filename}", line {f.f_lineno} in {f.f_code.co_name}' for f in frames[::-1])
            yield "\n".join(["Task that waits (most recent call first):", *lines])


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a coroutine that waits, outermost first."""
    for _ in range(DEPTH_MAX):
        frame = getattr(coroutine, "cr_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None)
