"""What both clients ask: one method a question, which gives what ``ask`` of the client gives."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from rota.service import calls
from rota.service.calls import API_PATH, Ask
from rota.service.http import Document

T = TypeVar("T")
EXECUTE_EXTRA_S = 30.0


class Questions(Generic[T]):
    """The reads and changes of the REST interface; an answer is a document, or the promise of one."""

    def ask(self, ask: Ask) -> T:
        """Send one request; ``safe`` ones again when the connection broke."""
        raise NotImplementedError

    def submit(self, body: Mapping[str, Any], *, key: str = "") -> T:
        """The lower form of ``run``: the body as it is sent; gives the ``Job`` document."""
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}  # sent again under it, it is still one job
        return self.ask(Ask(method="POST", path=f"{API_PATH}/jobs", body=body, headers=headers))

    def plan(self, body: Mapping[str, Any]) -> T:
        """``PlanReport``: what the job would become; nothing is started or kept."""
        return self.ask(Ask(method="POST", path=f"{API_PATH}/jobs:plan", body=body))

    def jobs(self, **filters: Any) -> T:
        """One page (``JobList``). Filters: all, state, queue, user, name, label, since_s, sort, limit, cursor."""
        return self.ask(calls.get("/jobs", **filters))

    def job(self, job: str) -> T:
        """``Job``: state, roles, instances, attempts. ``job`` is an id or a unique beginning of one."""
        return self.ask(calls.get(calls.job_path(job)))

    def explain(self, job: str) -> T:
        """``Explanation``: why the job waits, what is ahead, what would help."""
        return self.ask(calls.get(calls.job_path(job, "explain")))

    def why(self, job: str) -> T:
        """``WaitGraph``: who waits for whom in a running job."""
        return self.ask(calls.get(calls.job_path(job, "why")))

    def failures(self, job: str, *, attempt: int | None = None) -> T:
        """``FailureList``: what failed first, and what was done about it."""
        return self.ask(calls.get(calls.job_path(job, "failures"), attempt=attempt))

    def trace(self, job: str) -> T:
        """``Trace``: what every instance ran and waited for, in the form that Perfetto opens, with a ``summary``."""
        return self.ask(calls.get(calls.job_path(job, "trace")))

    def graph(self, job: str) -> T:
        """``Graph``: roles, edges, sub-graphs, blast radius."""
        return self.ask(calls.get(calls.job_path(job, "graph")))

    def placement(self, job: str) -> T:
        """Which devices of which nodes the job holds."""
        return self.ask(calls.get(calls.job_path(job, "placement")))

    def spec(self, job: str) -> T:
        """The job as it was understood, with the text it came from."""
        return self.ask(calls.get(calls.job_path(job, "spec")))

    def stop(self, job: str, *, grace_s: float | None = None) -> T:
        """Ask a job to end; gives the ``Job`` document."""
        return self._tell(job, "stop", {} if grace_s is None else {"grace_s": grace_s})

    def pause(self, job: str, *, grace_s: float | None = None) -> T:
        """Ask a job to give its devices back and wait until ``resume``; gives the ``Job`` document."""
        return self._tell(job, "pause", None if grace_s is None else {"grace_s": grace_s})

    def resume(self, job: str) -> T:
        """Put a paused job into the queue again. Raises Conflict if it takes 20 s to give its devices back."""
        return self._tell(job, "resume", None)

    def execute(self, job: str, instance: str, argv: Sequence[str], *, timeout_s: float = 60.0) -> T:
        """``Exec``: run a command beside a running instance (``role`` or ``role/rank``): its end and what it printed.

        Raises Conflict when the instance does not run.
        """
        body = {"instance": instance, "argv": list(argv), "timeout_s": timeout_s}
        path, limit_s = API_PATH + calls.job_path(job) + ":exec", timeout_s + EXECUTE_EXTRA_S
        return self.ask(Ask(method="POST", path=path, body=body, safe=False, timeout_s=limit_s))

    def scale(self, job: str, role: str, n: int) -> T:
        """Ask for ``n`` instances of a role, now and in later attempts; gives the ``Job`` document."""
        return self._tell(job, "scale", {"role": role, "n": n})

    def change(self, job: str, changes: Mapping[str, Any], *, if_version: int | None = None) -> T:
        """Change priority, queue, time_limit_s or labels; gives the ``Job`` document.

        Raises VersionMismatch when the job has another ``version`` than ``if_version``.
        """
        body, headers = {"changes": dict(changes)}, {} if if_version is None else {"If-Match": f'"{if_version}"'}
        path = API_PATH + calls.job_path(job)
        return self.ask(Ask(method="PATCH", path=path, body=body, headers=headers, safe=False))

    def mark_node(
        self, node: str, action: str, *, reason: str = "", notice_s: float | None = None, dry_run: bool = False
    ) -> T:
        """``DrainPlan`` of ``drain``, ``undrain`` or ``cordon``; who is drained has ``notice_s`` to move."""
        body = {"reason": reason, "dry_run": dry_run} | ({} if notice_s is None else {"notice_s": notice_s})
        return self.ask(Ask(method="POST", path=f"{API_PATH}/nodes/{quote(node, safe='')}:{action}", body=body))

    def apply_queues(self, queues: list[Document] | str, *, filename: str = "queues.yaml", dry_run: bool = False) -> T:
        """``QueueDiff`` of putting this tree of queues, values or the text of a file, in place of the present one."""
        tree = {"source": queues, "filename": filename} if isinstance(queues, str) else {"queues": queues}
        return self.ask(Ask(method="PUT", path=f"{API_PATH}/queues", body={**tree, "dry_run": dry_run}))

    def nodes(self) -> T:
        """``NodeList``."""
        return self.ask(calls.get("/nodes"))

    def queues(self) -> T:
        """``QueueTree``."""
        return self.ask(calls.get("/queues"))

    def status(self) -> T:
        """``Status`` of the service."""
        return self.ask(calls.get("/status"))

    def log_page(self, job: str, **filters: Any) -> T:
        """One page of log lines. Filters: instance, attempt, stream, since, until, tail, grep."""
        return self.ask(calls.get(calls.job_path(job, "logs"), **filters))

    def event_page(self, job: str = "", **filters: Any) -> T:
        """``EventList``: a page of events, of a job or of everything. Filters: after, type, limit."""
        return self.ask(calls.get(calls.events_path(job), **filters))

    def _tell(self, job: str, verb: str, body: Mapping[str, Any] | None) -> T:
        """A change that is the same when it is asked for twice."""
        return self.ask(Ask(method="POST", path=f"{API_PATH}{calls.job_path(job)}:{verb}", body=body))
