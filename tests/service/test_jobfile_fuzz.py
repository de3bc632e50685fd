"""Any text gives a job or problems with a place, never a traceback; any job survives being written and read again."""

# ruff: noqa: E501  tables of scraps

from __future__ import annotations

import os
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.service.jobfile.models import JobPart, RolePart, job_text
from rota.service.jobfile.reader import read_job
from rota.spec.check import check
from rota.spec.errors import JobFileError
from rota.spec.ids import RoleName
from rota.spec.job import Bound, Checkpoint, Edge, Fail, JobSpec, Near, RoleSpec, StreamSpec, WeightsEdge
from rota.spec.resources import Res

SCRAPS = st.sampled_from(
    [
        "name", "roles", "run", "workload", "mesh", "replicas", "jobName", "taskRoles", "{", "}", "[", "]", ":", ": ",
        ", ", "\n", "\n  ", "\n    ", "- ", "&a ", "*a", "<<: ", "'", '"', "|\n", ">", "#", "!!str ", "%YAML 1.1\n",
        "---\n", "...\n", "\t", "\x00", "\ufeff", "\ud800", "\U0001f600", "1", "1e400", ".nan", "yes", "08", "?", "//",
        "a -> b", "edges", "--", "\r", "\x85", "\u2028", "\\u12", "self", "apart", "{dp: 2}", "null", "~", "-1", "9" * 30,
    ]
)  # fmt: skip


SCALE = 75 if os.environ.get("ROTA_DEEP") else 1
"""75 makes 24,750 inputs."""


def is_read_or_refused(text: str | bytes, sets: list[str]) -> bool:
    """A good spec, or problems that each have a place and words; any other exception passes through."""
    try:
        spec = read_job(text, filename="f", sets=sets)
    except JobFileError as exc:
        told = [p.line >= 1 and p.col >= 1 and p.message and p.render() for p in exc.problems]
        return bool(told) and all(told)
    return not check(spec)


@settings(max_examples=100 * SCALE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SCRAPS, max_size=30).map("".join), st.lists(st.text(max_size=20), max_size=2))
def test_scraps_of_yaml_never_break_the_reader(text: str, sets: list[str]) -> None:
    assert is_read_or_refused(text, sets)


@settings(max_examples=50 * SCALE, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_never_break_the_reader(raw: bytes) -> None:
    assert is_read_or_refused(raw, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.sampled_from(["x", "a.b -> c.d", "2GiB", "5m", "*", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*JobPart.by_name(), *RolePart.by_name(), "min", "max"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100 * SCALE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*JobPart.by_name(), "rols"]), VALUES, max_size=6), VALUES)
def test_known_fields_with_any_value_never_break_the_reader(fields: dict[str, object], role: object) -> None:
    import json

    text = json.dumps({"name": "t", "roles": {"a": role, "b": {"run": "hi"}}} | fields)
    assert is_read_or_refused(text, [])


pytestmark = pytest.mark.slow

NAMES = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=8).map(lambda tail: "r" + tail)
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufeff\ufffe\uffff"), max_size=12)
PAIRS = st.dictionaries(NAMES.map(lambda name: name.replace("-", "_")), TEXTS, max_size=3).map(
    lambda d: tuple(d.items())
)
SECONDS = st.floats(0.001, 1e7, allow_nan=False).map(lambda value: round(value, 3))


def fails(low: int) -> st.SearchStrategy[Fail]:
    return st.builds(
        Fail,
        restart=st.sampled_from([None, "process", "role", "node", "job"]),
        limit_n=st.integers(0, 99),
        limit_window_s=SECONDS,
        then=st.sampled_from([("node", "job"), ("job",)]),
        state=st.sampled_from([("shadow",), ("none",), ("shadow", "peer", "checkpoint")]),
        degrade=st.none() | st.integers(1, low),
        standby=st.integers(0, 3),
        progress_s=SECONDS,
        bad_data=st.integers(0, 9),
        nan=st.sampled_from(["ignore", "rollback"]),
        backoff_s=SECONDS,
        check=st.sampled_from(["none", "quick"]),
    )


@st.composite
def roles(draw: st.DrawFn, name: str, others: list[str]) -> RoleSpec:
    sizes = draw(st.lists(st.integers(1, 3), max_size=2))
    mesh = tuple(zip(("dp", "tp"), sizes, strict=False))
    low = sizes[0] * (sizes[1] if len(sizes) > 1 else 1) if sizes else draw(st.integers(1, 4))
    extra = 0 if mesh else draw(st.integers(0, 3))
    run = draw(st.none() | st.lists(TEXTS.filter(lambda text: bool(text.strip())), min_size=1, max_size=3).map(tuple))
    return RoleSpec(
        name=RoleName(name),
        workload=None if run else "pkg.mod:Thing",
        run=run,
        shell=False,
        setup=draw(st.none() | TEXTS),
        replicas_min=low,
        replicas_max=low + extra,
        mesh=mesh,
        res=draw(
            st.builds(
                Res,
                cpus=st.floats(0, 64).map(lambda value: round(value, 2)),
                gpus=st.sampled_from([0.0, 0.25, 1.0, 8.0]),
                gpu_type=st.none() | NAMES,
                memory_bytes=st.integers(0, 2**50),
            )
        ),
        env=draw(PAIRS),
        fail=draw(fails(low)),
        apart=tuple(Near(role=other, level=draw(st.sampled_from(["device", "node"]))) for other in others[:1]),
        start_after=tuple(draw(st.lists(st.sampled_from(others), max_size=1))) if others else (),
    )


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    made = tuple(draw(roles(name, names[:index])) for index, name in enumerate(names))
    joined = len(names) > 1
    streams = (
        StreamSpec(name="s-1", cap=draw(st.integers(1, 99)), stale=Bound(versions=1, by="drop") if joined else None),
    )
    return JobSpec(
        name=draw(NAMES),
        roles=made,
        queue=draw(st.sampled_from(["default", "a/b"])),
        priority=draw(st.integers(-1, 100)),
        edges=(Edge(source="s-1", target=f"{names[0]}.op", kind="stream"),),
        streams=streams,
        weights=(WeightsEdge(source=RoleName(names[0]), target=RoleName(names[1]), lag=Bound(versions=3, seconds=draw(SECONDS))),)
        if joined
        else (),
        gang=draw(st.sampled_from(["all", "subgraph"])),
        retry=draw(st.integers(0, 9)),
        time_limit_s=draw(st.none() | SECONDS),
        grace_s=draw(SECONDS),
        checkpoint=draw(st.none() | st.builds(Checkpoint, dir=st.none() | TEXTS, every=st.sampled_from(["auto", "3 commits", "90s"]))),
        workdir=draw(st.none() | TEXTS),
        env=draw(PAIRS),
        labels=draw(PAIRS),
        secrets=draw(st.sampled_from([(), ("TOKEN",)])),
        success_when=draw(st.sampled_from([None, "all", (names[0],)])),
        seed=draw(st.integers(0, 2**40)),
    )  # fmt: skip


@pytest.mark.parametrize("form", ["yaml", "json"])
@settings(max_examples=40 * SCALE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spec=jobs())
def test_a_job_written_and_read_again_is_the_same(form: str, spec: JobSpec) -> None:
    assert read_job(job_text(spec, form), filename="f") == spec  # type: ignore[arg-type]
