"""Planted bugs of parts that the simulated system does not run, or hardly: unit tests must find each of them.

A bug replaces a text that occurs once in a source file; the tests named beside it run in a process that has the change.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest

from tests.mutants.areas import ROOT
from tests.mutants.mutate import Mutation
from tests.mutants.runner import (
    FAST,
    FOUND,
    QUIET,
    SURVIVED,
    EndsAtFailure,
    Mutant,
    repeatable,
    replace_code,
    run_all,
)


@dataclass(frozen=True, slots=True)
class Planted:
    """What is broken in a file below ``src/rota``, and the tests that must fail."""

    name: str
    file: str
    before: str
    now: str
    tests: str
    marks: str = "not real and not gpu"

    def mutant(self) -> Mutant:
        """The change as the runner of mutants takes it."""
        path = ROOT / "src" / "rota" / self.file
        source = path.read_bytes()
        assert source.count(self.before.encode()) == 1, f"{self.file} has {self.before!r} not once"
        begin = source.index(self.before.encode())
        line, end = source.count(b"\n", 0, begin) + 1, begin + len(self.before.encode())
        change = Mutation(kind="planted", line=line, begin=begin, end=end, new=self.now, ran=(line, line), late=True)
        return Mutant(path=path, mutation=change)


SURVIVAL, CHOICE, PROMISES = "job/core/survival.py", "cluster/core/choice.py", "cluster/core/promises.py"
SNAPSHOT, RING = "service/control/snapshot.py", "tensors/ring.py"
OF_SURVIVAL, OF_CHOICE = "tests/job/core/test_survival.py", "tests/cluster/test_cluster_choice.py"
OF_SNAPSHOT = "tests/service/test_snapshot.py::test_a_snapshot_that_cannot_be_trusted_is_not_used"
OF_RING = "tests/tensors/core/test_ring.py"
OF_PROMISES, OF_AFTER = "tests/cluster/test_cluster_promises.py", "tests/cluster/test_cluster_dependencies.py"

BUGS = (
    Planted("a copy of a part counts as one of the whole", SURVIVAL, "wanted <= found.keys()", "found", OF_SURVIVAL),
    Planted("copies on a lost machine are still there", SURVIVAL, "if one.host != host)", "if host)", OF_SURVIVAL),
    Planted("the copy of a commit that was given up counts", SURVIVAL, "event.n <= newest", "event.n", OF_SURVIVAL),
    Planted(
        "memory has commits that it no longer keeps",
        SURVIVAL,
        "n <= ctx.committed - commits_kept(ctx.spec)",
        "n <= ctx.committed - 9 * commits_kept(ctx.spec)",
        OF_SURVIVAL,
    ),
    Planted("what others need is not left to them", CHOICE, "rest -= others * (", "rest -= 0 * (", OF_CHOICE),
    Planted(
        "the fastest size wastes devices",
        CHOICE,
        "return cost_of(choice) > WASTE_MAX",
        "return -1 > WASTE_MAX",
        OF_CHOICE,
    ),
    Planted("a job grows though that does not pay", CHOICE, "now_s) <= GROW_S", "now_s) <= -GROW_S", OF_CHOICE),
    Planted("a job grows before those who wait", CHOICE, "not first.ask.spare and not limited", "limited", OF_CHOICE),
    Planted(
        "a promise is one device larger",
        PROMISES,
        "total + need[0] <= most",
        "total + need[0] <= most + 1000",
        OF_PROMISES,
        FAST,
    ),
    Planted(
        "of several changes the last is counted from",
        PROMISES,
        "first = min(first, at)",
        "first = at",
        OF_PROMISES,
        FAST,
    ),
    Planted(
        "a promise of one type covers all",
        PROMISES,
        "if asked and (have > most",
        "if not most and (have > most",
        OF_PROMISES,
        FAST,
    ),
    Planted(
        "who ended without success is waited for no longer",
        "cluster/live.py",
        'if after.when == "succeeded" else None',
        'if after.when == "ended" else None',
        OF_AFTER,
    ),
    Planted("a dependency is no gate", "cluster/core/cycle.py", "if not row.ask.after:", "if row.ask:", OF_AFTER),
    Planted("a snapshot of another log is used", SNAPSHOT, "or digest_of(found[0]) != ", "or not ", OF_SNAPSHOT),
    Planted("a damaged snapshot is used", SNAPSHOT, 'if _sha256(body) != head["sha256"]', "if not body", OF_SNAPSHOT),
    Planted(
        "a snapshot of another program is used",
        SNAPSHOT,
        'if head["program"] != self.program',
        "if not head",
        OF_SNAPSHOT,
    ),
    Planted(
        "records are read twice after a snapshot",
        SNAPSHOT,
        "return views.installation.number",
        "return 0",
        "tests/service/test_snapshot.py::test_a_start_from_a_snapshot_equals_a_replay_of_recorded_systems",
    ),
    Planted(
        "what a dead consumer had is lost",
        RING,
        "if word & _STATE == TAKEN else FREE",
        "if not word else FREE",
        OF_RING,
    ),
    Planted(
        "a record of an older taker is acknowledged", RING, " and self.words[at + _TRIES] == record.tries", "", OF_RING
    ),
    Planted(
        "the queue of a ring made anew is not in order",
        RING,
        "ready = sorted(each for",
        "ready = list(each for",
        OF_RING,
    ),
)


def outcome(tests: str, marks: str, bug: Planted | None = None) -> str:
    """What comes of the tests in a process of their own, with a bug or without any."""
    mutant, found = (bug or BUGS[0]).mutant(), list[str]()

    def work() -> bool:
        repeatable()
        try:
            if bug is not None:
                importlib.import_module(".".join(("rota", *bug.file.removesuffix(".py").split("/"))))
                if not replace_code(mutant):
                    return False
        except Exception:
            return False
        return pytest.main([*QUIET, "-m", marks, tests], plugins=[EndsAtFailure()]) == 0 or _ended()

    unfit = run_all([(mutant, 1, work)], 1, lambda one, result, tests: found.append(result))
    assert not unfit, "the plant itself failed"
    return found[0]


def _ended() -> bool:
    raise RuntimeError("not all tests passed")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_a_unit_test_finds_a_planted_bug(bug: Planted) -> None:
    assert outcome(bug.tests, bug.marks, bug) == FOUND, f"{bug.tests} pass though {bug.name}"


@pytest.mark.slow
@pytest.mark.parametrize("tests, marks", sorted({(bug.tests, bug.marks) for bug in BUGS}))
def test_the_same_tests_pass_in_such_a_process_without_a_bug(tests: str, marks: str) -> None:
    assert outcome(tests, marks) == SURVIVED


def test_what_every_planted_bug_breaks_is_there_to_be_broken() -> None:
    """A change of a line that leaves a plant without its text is seen by the fast tests, too."""
    for bug in BUGS:
        source = (ROOT / "src" / "rota" / bug.file).read_bytes()
        compile(bug.mutant().mutation.applied(source), bug.file, "exec")
    assert len({bug.name for bug in BUGS}) == len(BUGS)
