"""Every field of a job has a place in the code that acts on it; a field that nothing reads is not accepted."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rota
from rota.service.jobfile.models import json_schema
from rota.spec import job as model
from rota.spec.resources import Limits, Res

SOURCE = Path(rota.__file__).parent
JOB_FILE = json_schema()
CLASSES = (
    model.JobSpec, model.RoleSpec, model.Fail, model.Near, model.Edge, model.Bound, model.StreamSpec, model.WeightsEdge,
    model.Checkpoint, model.After, Res, Limits,
)  # fmt: skip
READERS = ("service/jobfile/", "service/views/", "job/builder.py")
"""What only carries a field from one form into another acts on nothing."""
WHOLE = ("service/control/job_plans.py", "asdict(model)")
"""``model`` is read as a whole: each of its fields is an argument of the search."""

ACTS: dict[str, tuple[str, str]] = {
    "JobSpec.name": ("service/control/intake.py", "spec.name"),
    "JobSpec.roles": ("job/core/check.py", "spec.roles"),
    "JobSpec.queue": ("cluster/live.py", "spec.queue"),
    "JobSpec.priority": ("cluster/live.py", "spec.priority"),
    "JobSpec.after": ("cluster/live.py", "spec.after"),
    "JobSpec.edges": ("job/core/check.py", "spec.edges"),
    "JobSpec.streams": ("job/core/check.py", "spec.streams"),
    "JobSpec.weights": ("job/rpc/client.py", "self._spec.weights"),
    "JobSpec.gang": ("job/core/placement.py", "spec.gang"),
    "JobSpec.retry": ("job/core/failover.py", "ctx.spec.retry"),
    "JobSpec.time_limit_s": ("cluster/core/jobs.py", "spec.time_limit_s"),
    "JobSpec.idle_limit_s": ("service/process/tasks.py", "one.spec.idle_limit_s"),
    "JobSpec.grace_s": ("cluster/core/jobs.py", "spec.grace_s"),
    "JobSpec.checkpoint": ("job/place.py", "spec.checkpoint"),
    "JobSpec.workdir": ("job/core/machine.py", "event.spec.workdir"),
    "JobSpec.data": ("job/master/executor.py", "spec.data"),
    "JobSpec.output": ("spec/job.py", "self.output"),
    "JobSpec.env": ("job/master/executor.py", "spec.env"),
    "JobSpec.packages": ("spec/job.py", "self.packages"),
    "JobSpec.secrets": ("job/master/executor.py", "spec.secrets"),
    "JobSpec.image": ("spec/check.py", "spec.image"),
    "JobSpec.labels": ("cluster/core/jobs.py", "spec.labels"),
    "JobSpec.run_as": ("job/instance/tenant.py", "config.spec.run_as"),
    "JobSpec.success_when": ("job/core/desired.py", "ctx.spec.success_when"),
    "JobSpec.seed": ("job/instance/runners.py", "config.spec.seed"),
    "RoleSpec.name": ("job/rpc/client.py", "role.name"),
    "RoleSpec.workload": ("job/instance/runners.py", "self._config.role.workload"),
    "RoleSpec.args": ("job/instance/operations.py", "config.role.args"),
    "RoleSpec.run": ("job/core/check.py", "role.run"),
    "RoleSpec.shell": ("job/instance/spmd.py", "role.shell"),
    "RoleSpec.setup": ("job/instance/spmd.py", "config.role.setup"),
    "RoleSpec.replicas_min": ("job/rpc/client.py", "role.replicas_min"),
    "RoleSpec.replicas_max": ("job/rpc/client.py", "role.replicas_max"),
    "RoleSpec.mesh": ("job/instance/runners.py", "config.role.mesh"),
    "RoleSpec.elastic_axis": ("job/core/resize.py", "role.elastic_axis"),
    "RoleSpec.res": ("job/core/placement.py", "role.res"),
    "RoleSpec.limits": ("job/master/executor.py", "role.limits"),
    "RoleSpec.packages": ("spec/job.py", "role.packages"),
    "RoleSpec.ports": ("job/instance/runners.py", "role.ports"),
    "RoleSpec.env": ("job/instance/spmd.py", "role.env"),
    "RoleSpec.fail": ("job/core/check.py", "role.fail"),
    "RoleSpec.collocate": ("job/core/graph.py", "role.collocate"),
    "RoleSpec.apart": ("job/core/placement.py", "role.apart"),
    "RoleSpec.start_after": ("job/core/graph.py", "role.start_after"),
    "RoleSpec.interface": ("job/core/check.py", "role.interface"),
    "RoleSpec.plan": ("service/control/job_plans.py", "role.plan"),
    "RoleSpec.model": ("service/control/job_plans.py", "role.model"),
    "RoleSpec.plans": ("job/core/placement.py", "role.plans"),
    "RoleSpec.start": ("spec/job.py", "self.start"),
    "After.job": ("cluster/live.py", "one.job"),
    "After.when": ("cluster/live.py", "after.when"),
    "Fail.restart": ("spec/job.py", "self.fail.restart"),
    "Fail.limit_n": ("job/core/check.py", "role.fail.limit_n"),
    "Fail.limit_window_s": ("job/core/check.py", "role.fail.limit_window_s"),
    "Fail.same": ("job/core/check.py", "role.fail.same"),
    "Fail.then": ("job/core/failover.py", "role.fail.then"),
    "Fail.state": ("job/core/survival.py", "role.fail.state"),
    "Fail.degrade": ("job/core/failover.py", "role.fail.degrade"),
    "Fail.standby": ("spec/job.py", "self.fail.standby"),
    "Fail.progress_s": ("job/master/diagnosis.py", "ctx.role(one.id.role).fail.progress_s"),
    "Fail.bad_data": ("job/instance/streams.py", "stop.role.fail.bad_data"),
    "Fail.nan": ("job/instance/flow.py", "role.fail.nan"),
    "Fail.backoff_s": ("job/core/failover.py", "fail.backoff_s"),
    "Fail.check": ("job/core/desired.py", "role.fail.check"),
    "Fail.slow": ("job/instance/runners.py", "self._config.role.fail.slow"),
    "Near.role": ("job/core/graph.py", "near.role"),
    "Near.level": ("job/core/graph.py", "near.level"),
    "Near.share": ("job/core/graph.py", "near.share"),
    "Edge.source": ("job/core/check.py", "edge.source"),
    "Edge.target": ("job/rpc/client.py", "edge.target"),
    "Edge.kind": ("job/core/check.py", "edge.kind"),
    "Edge.micro": ("job/core/check.py", "edge.micro"),
    "Edge.inflight": ("job/core/check.py", "edge.inflight"),
    "Bound.versions": ("job/core/ledger.py", "bound.versions"),
    "Bound.by": ("job/core/ledger.py", "bound.by"),
    "Bound.seconds": ("job/instance/operations.py", "lag.seconds"),
    "StreamSpec.name": ("job/core/check.py", "stream.name"),
    "StreamSpec.source": ("job/core/graph.py", "stream.source"),
    "StreamSpec.key": ("job/instance/streams.py", "spec.key"),
    "StreamSpec.cap": ("job/core/graph.py", "stream.cap"),
    "StreamSpec.stale": ("job/core/ledger.py", "self.spec.stale"),
    "StreamSpec.full": ("job/core/ledger.py", "self.spec.full"),
    "WeightsEdge.source": ("job/core/check.py", "edge.source"),
    "WeightsEdge.target": ("job/rpc/client.py", "edge.target"),
    "WeightsEdge.every": ("job/core/check.py", "edge.every"),
    "WeightsEdge.via": ("job/core/check.py", "edge.via"),
    "WeightsEdge.lag": ("job/instance/flow.py", "edge.lag"),
    "Checkpoint.dir": ("job/place.py", "spec.checkpoint.dir"),
    "Checkpoint.every": ("job/checkpoint.py", "spec.every"),
    "Checkpoint.keep": ("job/instance/instance.py", "checkpoint.keep"),
    "Res.cpus": ("cluster/core/jobs.py", "bundle.res.cpus"),
    "Res.gpus": ("cluster/core/jobs.py", "bundle.res.gpus"),
    "Res.gpu_type": ("cluster/core/jobs.py", "bundle.res.gpu_type"),
    "Res.memory_bytes": ("cluster/core/jobs.py", "bundle.res.memory_bytes"),
    "Limits.processes": ("runtime/ray/launcher.py", "spec.limits.processes"),
    "Limits.files": ("runtime/ray/launcher.py", "spec.limits.files"),
    "Limits.disk_bytes": ("runtime/ray/launcher.py", "spec.limits.disk_bytes"),
}
"""Field -> the file that acts on it, and how the field is read there."""
NOT_IN_THE_FILE = {"JobSpec.spec_version"}
WRITTEN = {
    "memory": "memory_bytes", "limit": "limit_n", "progress": "progress_s", "backoff": "backoff_s", "from": "source",
    "to": "target", "resources": "res", "replicas": "replicas_min", "time_limit": "time_limit_s", "grace": "grace_s",
    "idle_limit": "idle_limit_s",
    "min": "replicas_min", "max": "replicas_max", "disk": "disk_bytes",
}  # fmt: skip
"""Names of the job file that have another name in the spec."""


@cache
def read_in(file: str) -> frozenset[str]:
    """The attributes and calls of a file, as text."""
    tree = ast.parse((SOURCE / file).read_text())
    return frozenset(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Call))


def idle(classes: tuple[Any, ...]) -> list[str]:
    """Fields for which no place is named, or that are not read at the place that is named."""
    names = [f"{cls.__name__}.{one.name}" for cls in classes for one in dataclasses.fields(cls)]
    given = {name: ACTS.get(name) for name in names if name not in NOT_IN_THE_FILE}
    return [name for name, place in given.items() if place is None or place[1] not in read_in(place[0])]


def test_every_field_of_a_job_is_read_where_something_is_done_about_it() -> None:
    assert idle(CLASSES) == []
    assert WHOLE[1] in read_in(WHOLE[0])
    carried = {name: file for name, (file, _) in ACTS.items() if file.startswith(READERS)}
    assert carried == {}, "such a file acts on nothing"
    known = {f"{cls.__name__}.{one.name}" for cls in CLASSES for one in dataclasses.fields(cls)}
    assert set(ACTS) - known == set(), "a field that is gone"
    assert [name for name, (_, text) in ACTS.items() if text.rpartition(".")[2] != name.partition(".")[2]] == []


def test_a_field_that_nothing_reads_is_found() -> None:
    more = dataclasses.make_dataclass("Fail", [("dummy", int, 0)], bases=(model.Fail,), frozen=True, kw_only=True)
    assert idle((more,)) == ["Fail.dummy"]


@pytest.mark.parametrize("name", sorted(set(JOB_FILE["properties"]) - {"$schema"}))
def test_every_name_of_the_job_file_is_a_field_of_the_spec(name: str) -> None:
    fields = {one.name for cls in (*CLASSES, model.TrainedModel) for one in dataclasses.fields(cls)}
    found: set[str] = set()

    def names(schema: Any) -> None:
        if isinstance(schema, dict):
            found.update(schema.get("properties", {}))
            if "$ref" in schema:
                names(JOB_FILE["$defs"][schema["$ref"].rpartition("/")[2]])
            for below in schema.values():
                names(below)
        elif isinstance(schema, list):
            for below in schema:
                names(below)

    names(JOB_FILE["properties"][name])
    assert [one for one in {name, *found} if WRITTEN.get(one, one) not in fields] == []
