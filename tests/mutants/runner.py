"""Run mutants of one area: collect its tests once, then fork a process for each mutant and run the tests that reach it.

A mutant inside a function changes the code of what is imported already. What runs at the import (a constant, a default)
needs a process that imports the changed file anew, which costs about a second more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutants.areas import ROOT
from tests.mutants.mutate import Mutation

FAST = "not real and not slow and not gpu"
TESTS_MAX_S = 20.0
"""The tests of one mutant: the shortest first, up to this time of an unchanged run."""
WALL_MAX_S, CPU_MAX_S = 60.0, 20.0
MEMORY_MAX_BYTES = 64 * 2**30
"""Of addresses, most of which torch reserves and never touches."""
FOUND, SURVIVED, ENDLESS = "found", "survived", "endless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mutation of one file."""

    path: Path
    mutation: Mutation

    @property
    def name(self) -> str:
        """The file below the root of the repository."""
        return str(self.path.relative_to(ROOT))


@dataclass(slots=True)
class Reached:
    """What a run of all tests without a change reached."""

    lines: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    files: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: set[str] = field(default_factory=set[str])

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that run the statement, the shortest first; of what runs at the import, those that use the file."""
        path, (first, last) = str(mutant.path), mutant.mutation.ran
        found = set[str]().union(*(self.lines.get((path, line), ()) for line in range(first, last + 1)))
        if not found and not mutant.mutation.late:
            found = self.files.get(path) or set(self.seconds)
        ordered, spent_s = list[str](), 0.0
        for test in sorted(found - self.failed, key=lambda one: (self.seconds[one], one)):
            spent_s += self.seconds[test]
            if ordered and spent_s > TESTS_MAX_S:
                break
            ordered.append(test)
        return ordered


class Watch:
    """Notes which tests reach which lines; ``wanted`` keeps the cost low."""

    def __init__(self, wanted: dict[str, set[int]], reached: Reached) -> None:
        self._wanted, self._reached = wanted, reached
        self._test = ""
        self._codes: dict[CodeType, bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._test, began_s = item.nodeid, time.process_time()
        sys.settrace(self._enter)
        threading.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._reached.seconds[item.nodeid] = time.process_time() - began_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reached.failed.add(report.nodeid)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        lines = self._wanted.get(code.co_filename)
        if lines is None:
            return None
        self._reached.files[code.co_filename].add(self._test)
        if code not in self._codes:
            self._codes[code] = any(line in lines for _, _, line in code.co_lines() if line)
        return self._line if self._codes[code] else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self._reached.lines[frame.f_code.co_filename, frame.f_lineno].add(self._test)
        return self._line


class EndsAtFailure:
    """The process of a mutant ends at the first test that fails."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os._exit(1)


class Session:
    """Collects the tests of an area, then runs the mutants in processes forked from here."""

    def __init__(self, mutants: Sequence[Mutant], workers: int, say: Callable[[Mutant, str, int], None]) -> None:
        self._mutants, self._workers, self._say = mutants, workers, say
        self.left: list[tuple[Mutant, list[str]]] = []
        """Those that need a fresh import, with their tests."""
        self.failed: list[str] = []
        """Tests that fail without a change, and are left out."""

    def pytest_configure(self, config: pytest.Config) -> None:
        repeatable()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Failed("the tests do not import")
        reached = self._reach(session)
        self.failed = sorted(reached.failed)
        items = {item.nodeid: item for item in session.items}
        jobs = list[tuple[Mutant, int, Callable[[], bool]]]()
        for mutant in self._mutants:
            tests = reached.tests(mutant)
            if not tests:
                self._say(mutant, SURVIVED, 0)
            elif mutant.mutation.late:
                jobs.append((mutant, len(tests), _here(session, mutant, [items[test] for test in tests])))
            else:
                self.left.append((mutant, tests))
        unfit = run_all(jobs, self._workers, self._say)
        self.left.extend((mutant, reached.tests(mutant)) for mutant in unfit)
        return True

    def _reach(self, session: pytest.Session) -> Reached:
        wanted: dict[str, set[int]] = defaultdict(set)
        for mutant in self._mutants:
            first, last = mutant.mutation.ran
            wanted[str(mutant.path)].update(range(first, last + 1))

        def work() -> Reached:
            reached = Reached()
            session.config.pluginmanager.register(Watch(wanted, reached))
            _run_items(session, session.items)
            return Reached(
                lines=dict(reached.lines),
                files=dict(reached.files),
                seconds=dict(reached.seconds),
                failed=reached.failed,
            )

        return in_child(work)


def repeatable() -> None:
    """Property tests draw the same examples in every process, and keep none."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", settings(), derandomize=True, database=None, phases=phases)
    settings.load_profile("mutants")


def _run_items(session: pytest.Session, items: Sequence[pytest.Item]) -> None:
    for i, item in enumerate(items):
        following = items[i + 1] if i + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _here(session: pytest.Session, mutant: Mutant, items: list[pytest.Item]) -> Callable[[], bool]:
    def work() -> bool:
        if not replace_code(mutant):
            return False
        session.config.pluginmanager.register(EndsAtFailure())
        _run_items(session, items)
        return True

    return work


def replace_code(mutant: Mutant) -> bool:
    """Change the functions that exist in this process; False when they cannot take the code."""
    source = mutant.path.read_bytes()
    old = compile(source, str(mutant.path), "exec", dont_inherit=True)
    new = compile(mutant.mutation.applied(source), str(mutant.path), "exec", dont_inherit=True)
    changed = {(code.co_qualname, code.co_firstlineno): code_now for code, code_now in _pairs(old, new)}
    done = 0
    gc.unfreeze()  # what was left out of garbage collection is not listed
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == str(mutant.path):
            code = changed.get((one.__code__.co_qualname, one.__code__.co_firstlineno))
            if code is not None:
                try:
                    one.__code__ = code
                except ValueError:
                    return False
                done += 1
    return done > 0


def _pairs(old: CodeType, new: CodeType) -> Iterable[tuple[CodeType, CodeType]]:
    """The functions of a file that a change is in: itself, and those around it."""
    inner = [one for one in old.co_consts if isinstance(one, CodeType)]
    inner_now = [one for one in new.co_consts if isinstance(one, CodeType)]
    if old == new:
        return
    yield old, new
    if len(inner) == len(inner_now):
        for one, other in zip(inner, inner_now, strict=True):
            yield from _pairs(one, other)


def anew(mutant: Mutant, tests: Sequence[str]) -> Callable[[], bool]:
    """Work that imports everything with the change and runs ``tests``."""

    def work() -> bool:
        sys.meta_path.insert(0, _Changed(mutant))
        chosen = Chosen(tests)
        files = sorted({test.partition("::")[0] for test in tests})
        status = pytest.main([*QUIET, *files], plugins=[chosen, EndsAtFailure()])
        if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            os._exit(1)
        return True

    return work


QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", FAST, "--import-mode=prepend")


class Chosen:
    """Keeps the chosen tests alone."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: i for i, test in enumerate(tests)}

    def pytest_configure(self, config: pytest.Config) -> None:
        repeatable()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]


class _Changed(importlib.abc.MetaPathFinder):
    """Finds the one module whose source is changed."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = ".".join(mutant.path.relative_to(ROOT / "src").with_suffix("").parts)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, str(self._mutant.path))
        loader.changed = self._mutant.mutation.applied(self._mutant.path.read_bytes())
        return importlib.util.spec_from_file_location(fullname, self._mutant.path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    changed = b""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.changed, self.path, "exec", dont_inherit=True)


# -- processes --------------------------------------------------------------------------------------------------------


def run_all(
    jobs: Sequence[tuple[Mutant, int, Callable[[], bool]]], workers: int, say: Callable[[Mutant, str, int], None]
) -> list[Mutant]:
    """Each in a process of its own, ``workers`` at a time; those whose work said that it cannot be done here."""
    waiting, running, unfit = list(reversed(jobs)), dict[int, tuple[Mutant, int, float]](), list[Mutant]()
    while waiting or running:
        while waiting and len(running) < workers:
            mutant, tests, work = waiting.pop()
            running[_fork(work)] = (mutant, tests, time.monotonic() + WALL_MAX_S)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid not in running:
            for late in [pid for pid, (_, _, until_s) in running.items() if time.monotonic() > until_s]:
                os.killpg(late, signal.SIGKILL)
            time.sleep(0.005)
            continue
        mutant, tests, _ = running.pop(pid)
        _end_group(pid)
        if os.WIFSIGNALED(status):
            say(mutant, ENDLESS, tests)
        elif os.WEXITSTATUS(status) == CANNOT:
            unfit.append(mutant)
        else:
            say(mutant, FOUND if os.WEXITSTATUS(status) else SURVIVED, tests)
    return unfit


CANNOT = 77


def _fork(work: Callable[[], bool]) -> int:
    """The process group of a child that does ``work`` in silence: 0 all tests passed, 1 one failed."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(CPU_MAX_S + TESTS_MAX_S), resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, resource.RLIM_INFINITY))
        _silent()
        os._exit(0 if work() else CANNOT)
    finally:
        os._exit(1)


def _silent() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` gives in a process of its own, which leaves this one as it was."""
    read, write = os.pipe()
    sys.stdout.flush()
    if not (pid := os.fork()):
        try:
            os.close(read)
            _silent()
            found = pickle.dumps(work())
            with os.fdopen(write, "wb") as pipe:
                pipe.write(found)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        raw = pipe.read()
    os.waitpid(pid, 0)
    if not raw:
        raise RuntimeError("the run without a change ended before it reported")
    return pickle.loads(raw)
