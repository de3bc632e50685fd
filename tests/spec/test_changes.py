"""A change after submit is read in one way, and a bad one is never the end of whoever replays it."""

from __future__ import annotations

import pytest

from rota.spec.ids import RoleName
from rota.spec.job import JobSpec, RoleSpec, changed_spec

SPEC = JobSpec(name="j", roles=(RoleSpec(name=RoleName("r"), run=("true",)),))


def test_paths_reach_the_job_its_roles_and_their_resources() -> None:
    found = changed_spec(SPEC, {"priority": 7, "roles.r.replicas": 3, "roles.r.resources.cpus": 2.0})
    role = found.role("r")
    assert (found.priority, role.replicas_min, role.replicas_max, role.res.cpus) == (7, 3, 3, 2.0)


@pytest.mark.parametrize("changes", [{"priority": "high"}, {"roles.x.replicas": 2}, {"no.such.path": 1}, {"roles": 3}])
def test_what_does_not_fit_changes_nothing(changes: dict[str, object]) -> None:
    assert changed_spec(SPEC, changes) == SPEC
