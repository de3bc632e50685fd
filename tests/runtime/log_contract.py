"""What every event log must do; run by test_event_log.py against each of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rota.runtime.event_log.interface import INSTALL_SCOPE, EventLog, KeptContext, Writer, master_scope
from rota.spec.errors import Fenced, SeqConflict
from rota.spec.events import JobEnded, JobQueued, ServiceStarted, TimerFired
from rota.spec.ids import Epoch, JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState

A, B = JobId("a-1"), JobId("b-1")


def service(log: EventLog) -> Writer:
    return Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE))


def kept(seq: int, body: str = "{}") -> KeptContext:
    return KeptContext(seq=seq, number=2 * seq, body=body)


def tick(name: str) -> TimerFired:
    return TimerFired(timer=name)


class LogContract:
    """A subclass gives the fixture ``log``: an empty EventLog."""

    def test_an_empty_log_has_no_records_and_no_fences(self, log: EventLog) -> None:
        assert log.last_number() == 0
        assert log.read() == ()
        assert log.fence(INSTALL_SCOPE) == 0

    def test_records_are_numbered_in_one_order_and_within_their_job(self, log: EventLog) -> None:
        me = service(log)
        log.append([tick("a1"), tick("a2")], writer=me, job=A)
        log.append([tick("b1")], writer=me, job=B)
        log.append([ServiceStarted(install_epoch=me.epoch, pid=1)], writer=me)
        log.append([tick("a3")], writer=me, job=A)
        seen = [(record.number, record.job, record.seq) for record in log.read()]
        assert seen == [(1, A, 1), (2, A, 2), (3, B, 1), (4, None, 0), (5, A, 3)]
        assert log.last_number() == 5

    def test_what_append_returns_is_what_read_gives(self, log: EventLog) -> None:
        me = service(log)
        ended = JobEnded(state=JobState.FAILED, reason=Reason.USER_ERROR, text="grüße\x00\n", traceback="T")
        written = log.append([JobQueued(), ended], writer=me, job=A)
        assert log.read() == written
        assert written[1].event == ended

    def test_an_empty_append_writes_nothing_but_is_fenced(self, log: EventLog) -> None:
        old = service(log)
        assert log.append([], writer=old, job=A) == ()
        service(log)
        with pytest.raises(Fenced):
            log.append([], writer=old, job=A)

    def test_a_cursor_reads_every_record_once(self, log: EventLog) -> None:
        me = service(log)
        for i in range(10):
            log.append([tick(str(i))], writer=me, job=A if i % 2 else B)
        pages, after = [], 0
        while page := log.read(after=after, limit=3):
            pages.append([record.number for record in page])
            after = page[-1].number
        assert pages == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10]]

    def test_reads_of_one_job_or_of_the_cluster_leave_out_the_rest(self, log: EventLog) -> None:
        me = service(log)
        log.append([tick("a")], writer=me, job=A)
        log.append([ServiceStarted(install_epoch=me.epoch, pid=1)], writer=me)
        log.append([tick("b")], writer=me, job=B)
        log.append([tick("a")], writer=me, job=A)
        assert [record.number for record in log.read(job=A)] == [1, 4]
        assert [record.number for record in log.read(job=A, after=1)] == [4]
        assert [record.number for record in log.read(cluster=True)] == [2]

    def test_a_sample_is_spread_evenly_and_has_the_newest(self, log: EventLog) -> None:
        writer = service(log)
        for n in range(1, 8):
            log.append([tick(f"t{n}"), JobQueued()], writer=writer, job=A)
            log.append([tick("other")], writer=writer, job=B)

        def names(points: int) -> list[str]:
            return [one.event.timer for one in log.sample(A, "TimerFired", points)]  # type: ignore[union-attr]

        assert names(1) == ["t7"]
        assert names(2) == ["t3", "t7"]
        assert names(3) == ["t1", "t4", "t7"]
        assert names(7) == names(100) == [f"t{n}" for n in range(1, 8)]
        assert log.sample(A, "Committed", 5) == log.sample(JobId("c-1"), "TimerFired", 5) == ()

    def test_a_write_on_an_older_state_of_the_job_is_refused_whole(self, log: EventLog) -> None:
        me = service(log)
        log.append([tick("1")], writer=me, job=A, expected_seq=0)
        with pytest.raises(SeqConflict):
            log.append([tick("2"), tick("3")], writer=me, job=A, expected_seq=0)
        assert log.last_number() == 1
        log.append([tick("2")], writer=me, job=A, expected_seq=1)
        log.append([tick("1")], writer=me, job=B, expected_seq=0)

    def test_a_replaced_writer_is_refused_and_its_successor_is_not(self, log: EventLog) -> None:
        old = service(log)
        new = service(log)
        assert new.epoch == old.epoch + 1
        with pytest.raises(Fenced) as refused:
            log.append([tick("late")], writer=old, job=A)
        assert refused.value.fields == {"scope": INSTALL_SCOPE, "epoch": old.epoch, "fence": new.epoch}
        assert log.read() == ()
        log.append([tick("now")], writer=new, job=A)

    def test_an_epoch_nobody_took_is_refused(self, log: EventLog) -> None:
        with pytest.raises(Fenced):
            log.append([tick("x")], writer=Writer(scope=INSTALL_SCOPE, epoch=Epoch(1)), job=A)

    def test_fences_of_scopes_are_apart(self, log: EventLog) -> None:
        me = service(log)
        master = Writer(scope=master_scope(A), epoch=log.take_epoch(master_scope(A)))
        log.take_epoch(master_scope(B))
        log.append([tick("s")], writer=me, job=A)
        log.append([tick("m")], writer=master, job=A, expected_seq=1)
        assert log.fence(master_scope(A)) == 1

    def test_of_two_that_expect_the_same_epoch_one_gets_it(self, log: EventLog) -> None:
        assert log.take_epoch("job/x", expected=Epoch(0)) == 1
        with pytest.raises(SeqConflict):
            log.take_epoch("job/x", expected=Epoch(0))
        assert log.fence("job/x") == 1

    def test_events_of_a_job_need_a_job_and_those_of_the_cluster_none(self, log: EventLog) -> None:
        me = service(log)
        with pytest.raises(ValueError, match="TimerFired"):
            log.append([tick("x")], writer=me)
        with pytest.raises(ValueError, match="ServiceStarted"):
            log.append([ServiceStarted(install_epoch=me.epoch, pid=1)], writer=me, job=A)

    def test_of_many_threads_with_one_expectation_exactly_one_writes(self, log: EventLog) -> None:
        me = service(log)
        start = threading.Barrier(8)

        def attempt(i: int) -> bool:
            start.wait(timeout=60)
            try:
                log.append([tick(str(i))], writer=me, job=A, expected_seq=0)
            except SeqConflict:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(attempt, range(8))) == 1
        assert log.last_number() == 1

    def test_the_newest_two_contexts_of_a_job_are_kept_until_it_ends(self, log: EventLog) -> None:
        me = service(log)
        for seq in (10, 30, 20):
            log.keep_context(A, kept(seq), writer=me)
        log.keep_context(B, kept(5), writer=me)
        assert log.contexts(A) == (kept(30), kept(20))
        log.keep_context(A, kept(30, "again"), writer=me)
        assert log.contexts(A) == (kept(30, "again"), kept(20))
        log.append([JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED)], writer=me, job=A)
        assert (log.contexts(A), log.contexts(B)) == ((), (kept(5),))

    def test_a_replaced_writer_keeps_no_context(self, log: EventLog) -> None:
        old = service(log)
        service(log)
        with pytest.raises(Fenced):
            log.keep_context(A, kept(1), writer=old)
        assert log.contexts(A) == ()
