"""Job files: what is read, what is refused, and where."""

# ruff: noqa: E501  a table of cases reads best with one case a line

from __future__ import annotations

import json
import time

import pytest

from rota.service.jobfile.reader import problems_of, read_job
from rota.spec.errors import JobFileError
from rota.spec.job import Bound, Edge, Fail, JobSpec, Near, RoleSpec, WeightsEdge

FULL = """\
name: grpo-sums
queue: research/rl
roles:
  actor:   {workload: "grpo_sums:Policy", replicas: 2, mesh: {dp: 2}, resources: {cpus: 1.5, memory: 2GiB},
            fail: {restart: role, state: peer|checkpoint, limit: 2/10m, then: node|job}}
  ref:     {workload: "grpo_sums:Policy", replicas: 2, collocate: [{role: actor, share: lease}], env: {FROZEN: 1}}
  rollout: {workload: "grpo_sums:Rollout", replicas: {min: 1, max: 4}, apart: [actor],
            fail: {restart: process, degrade: 1, standby: 1, progress: 2m}}
  reward:  {workload: "grpo_sums:Verifier", replicas: 2, fail: {restart: process, bad_data: 10}}
  loop:    {workload: "grpo_sums:grpo"}
streams: {prompts: {source: "grpo_sums:prompts", key: uid}, groups: {cap: 32, stale: {versions: 2, by: drop}}}
edges:   ["prompts -> rollout.generate -> reward.score -> groups"]
weights: [{from: actor, to: rollout, every: 1, via: auto, lag: {versions: 100, seconds: 5s}}]
checkpoint: {every: 20 commits, keep: 2}
retry: 3
time_limit: 1h30m
"""


def job(*roles: str, top: str = "") -> str:
    body = "".join(f"  {role}\n" for role in roles or ("a: {run: hi}",))
    return f"name: t\n{top}roles:\n{body}"


def problems(text: str | bytes, *sets: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        read_job(text, filename="job.yaml", sets=sets)
    return [str(problem) for problem in caught.value.problems]


def test_a_full_job_becomes_the_same_values_as_written_in_python() -> None:
    spec = read_job(FULL, filename="job.yaml")

    actor = spec.role("actor")
    assert (actor.replicas_min, actor.mesh, actor.res.cpus, actor.res.memory_bytes) == (2, (("dp", 2),), 1.5, 2**31)
    assert actor.fail == Fail(restart="role", state=("peer", "checkpoint"), limit_n=2, limit_window_s=600.0)
    assert spec.role("ref").collocate == (Near(role="actor", level="device", share="lease"),)
    assert spec.role("ref").env == (("FROZEN", "1"),)
    assert spec.role("rollout").apart == (Near(role="actor"),)
    assert (spec.role("rollout").replicas_min, spec.role("rollout").replicas_max) == (1, 4)
    assert spec.edges == (
        Edge(source="prompts", target="rollout.generate", kind="stream"),
        Edge(source="rollout.generate", target="reward.score", kind="call"),
        Edge(source="reward.score", target="groups", kind="stream"),
    )
    assert spec.weights == (
        WeightsEdge(source=actor.name, target=spec.role("rollout").name, lag=Bound(versions=100, seconds=5)),
    )
    assert spec.checkpoint is not None and spec.checkpoint.every == "20 commits"
    assert (spec.retry, spec.time_limit_s, spec.queue) == (3, 5400.0, "research/rl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  a: {runn: hi}", "job.yaml:2:7: roles.a.runn: unknown field; did you mean 'run'?"),
        ("  a: {command: hi}", "job.yaml:2:7: roles.a.command: unknown field; did you mean 'run'?"),
        ("  a: {run: hi, count: 2}", "job.yaml:2:16: roles.a.count: unknown field; did you mean 'replicas'?"),
        ("  a: {run: hi, time: 1h}", "job.yaml:2:16: roles.a.time: unknown field; 'time_limit:' is a field of the job, beside 'roles:'"),
        ("  a: {run: hi, nodes: 2}", "job.yaml:2:16: roles.a.nodes: unknown field; did you mean 'replicas'?"),
        ("  a: {run: hi, max_restarts: 2}", "job.yaml:2:16: roles.a.max_restarts: unknown field; did you mean 'fail.limit'?"),
        ("  a: {run: hi, replicas: 3m}", "job.yaml:2:26: roles.a.replicas: expected a whole number from 1 to 100000, got '3m'"),
        ("  a: {run: hi, resources: {cpus: 500m}}", "job.yaml:2:34: roles.a.resources.cpus: expected a number, at least 0, got '500m'; write 0.5"),
        ("  a: {run: hi, fail: {restart: never}}", "job.yaml:2:32: roles.a.fail.restart: expected one of process, role, node, job, got 'never'; for never write 'limit: 0/10m, then: []'"),
        ("  a: {run: hi, fail: {restart: OnFailure}}", "job.yaml:2:32: roles.a.fail.restart: expected one of process, role, node, job, got 'OnFailure'; did you mean 'process'?"),
        ("  a: {run: hi, mem: 1GiB}", "job.yaml:2:16: roles.a.mem: unknown field; did you mean 'resources.memory'?"),
        ("  a: {run: hi}\nenv: {uv: [x]}", "job.yaml:3:11: env.uv: expected text, got a list; variables are text; 'packages:' installs packages"),
        ("  a: {run: hi, env: {packages: [x]}}", "job.yaml:2:32: roles.a.env.packages: expected text, got a list; variables are text; 'packages:' installs packages"),
        ("  a: {run: hi}\napiVersion: v1", "job.yaml:3:1: apiVersion: unknown field; a manifest of Kubernetes is read by kubectl; 'rota init --list' shows job files"),
        ("  a: {Run: hi}", "job.yaml:2:7: roles.a.Run: unknown field; did you mean 'run'?"),
        ("  a: {run: hi, cpus: 3}", "job.yaml:2:16: roles.a.cpus: unknown field; did you mean 'resources.cpus'?"),
        ("  a: {run: hi, cpu: 3}", "job.yaml:2:16: roles.a.cpu: unknown field; did you mean 'resources.cpus'?"),
        ("  a: {run: hi, replicas: two}", "job.yaml:2:26: roles.a.replicas: expected a whole number from 1 to 100000, got 'two'"),
        ("  a: {run: hi, replicas: -1}", "job.yaml:2:26: roles.a.replicas: expected a whole number from 1 to 100000, got '-1'"),
        ("  a: {run: hi, replicas: 1e3}", "job.yaml:2:26: roles.a.replicas: expected a whole number from 1 to 100000, got '1e3'; write 1000"),
        ("  a: {run: hi, replicas: 1_000}", "job.yaml:2:26: roles.a.replicas: expected a whole number from 1 to 100000, got '1_000'; write 1000"),
        ("  a: {run: hi, replicas: '2'}", "job.yaml:2:26: roles.a.replicas: expected a whole number from 1 to 100000, got '2'; write 2"),
        ("  a: {run: hi, replicas: yes}", "job.yaml:2:26: roles.a.replicas: expected a whole number from 1 to 100000, got 'yes'"),
        ("  a: {run: hi, fail: {limit: 3}}", "job.yaml:2:30: roles.a.fail.limit: 3 failures within which time?; 3/10m heals 3 failures within 10 minutes there; the next one goes to `then`"),
        ("  a: {run: hi, replicas: {min: 3, max: 2}}", "job.yaml:2:16: roles.a.replicas: min 3, max 2: 1 <= min <= max <= 100000 must hold"),
        ("  a: {run: hi, resources: {memory: 512}}", "job.yaml:2:36: roles.a.resources.memory: '512' is not a size with a unit; write 512MiB or 512GiB"),
        ("  a: {run: hi, resources: {gpus: 1.5}}", "job.yaml:2:34: roles.a.resources.gpus: 1.5 is neither a whole number of devices nor a fraction of one"),
        ("  a: {run: hi, fail: {progress: 90}}", "job.yaml:2:33: roles.a.fail.progress: '90' is not a duration with a unit; write 90s or 90m"),
        ("  a: {run: hi, fail: {restart: rol}}", "job.yaml:2:32: roles.a.fail.restart: expected one of process, role, node, job, got 'rol'; did you mean 'role'?"),
        ("  a: {run: hi, fail: {degrade: 2}}", "job.yaml:2:32: roles.a.fail.degrade: 2 is not between 1 and 1, the instances that start"),
        ("  a: {run: hi, workload: m:C}", "job.yaml:2:3: roles.a: has both 'workload' and 'run'; keep one"),
        ("  a: {}", "job.yaml:2:3: roles.a: needs 'workload' or 'run'; for example workload: module:Class, or run: python train.py"),
        ("  a: {workload: m.C}", "job.yaml:2:17: roles.a.workload: 'm.C' is not an import path; write module:Class or module:function"),
        ("  a: {run: hi, replicas: 4, mesh: {dp: 2, tp: 3}}", "job.yaml:2:29: roles.a.mesh: dp 2 * tp 3 = 6, but 4 instances start; set replicas to 6, or leave it out"),
        ("  a: {run: hi, start_after: a}", "job.yaml:2:29: roles.a.start_after[0]: a role cannot start after itself"),
        ("  a: {run: hi, start_after: [b]}", "job.yaml:2:30: roles.a.start_after[0]: no role 'b'; there is a"),
        ("  a: {run: hi, apart: [{role: a}]}", "job.yaml:2:24: roles.a.apart[0]: names the role itself; write 'self' for other members of the same role"),
        ("  2a: {run: hi}", "job.yaml:2:3: roles.2a: '2a' is not a name; a name begins with a letter and holds at most 63 letters, digits, '_', '.' and '-'"),
        ("  a: {run: hi, env: {A-B: x}}", "job.yaml:2:27: roles.a.env.A-B: 'A-B' cannot name a variable; letters, digits and '_', not beginning with a digit"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_role_is_told_at_its_place(line: str, message: str) -> None:
    assert problems(f"roles:\n{line}\nname: t\n") == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml:1:1: the file is empty; 'rota init --list' shows templates to begin with"),
        ("# only words\n", "job.yaml:1:1: the file is empty; 'rota init --list' shows templates to begin with"),
        ("hello", "job.yaml:1:1: expected a mapping with 'name' and 'roles', got 'hello'"),
        ("[1, 2]", "job.yaml:1:1: expected a mapping with 'name' and 'roles', got a list"),
        ("name: t\nroles:\n\ta: {run: hi}\n", "job.yaml:3:1: tabs are not allowed for indentation; indent with spaces"),
        ("name: t\nname: u\nroles: {a: {run: hi}}\n", "job.yaml:2:1: name: duplicate key; the first is in line 1"),
        ("name: t\nroles: {a: {run: hi}}\nretry: .nan\n", "job.yaml:3:8: .nan is not a number a job can use; give a finite number"),
        ("name: t\nroles: {a: {run: hi}}\nretry: .inf\n", "job.yaml:3:8: .inf is not a number a job can use; give a finite number"),
        ("name: !!python/object x\n", "job.yaml:1:7: the tag !!python/object is not allowed; write the plain value"),
        ("name: t\n---\nname: u\n", "job.yaml:2:1: a second document; one job a file"),
        ("name: 'x\n", "job.yaml:1:7: a quote is opened here and never closed; close it"),
        ("a: b: c\n", "job.yaml:1:5: ':' is not allowed here; check the indentation, or quote the text"),
        ("a: &x [*x]\n", "job.yaml:1:8: *x is used inside the value that it names"),
        ("a: *x\n", "job.yaml:1:4: no anchor &x before this alias"),
        ("[a]: b\n", "job.yaml:1:1: a key must be a name; quote it"),
        ("name: a\x01b\n", "job.yaml:1:8: character U+0001 is not allowed; remove it"),
        (b"name: t\nlabels: {x: \xff}\n", "job.yaml:2:13: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("name: t\n".encode("utf-16"), "job.yaml:1:1: the file is UTF-16; save it as UTF-8"),
        (b"x" * (2**20 + 1), "job.yaml:1:1: the file has 1048577 bytes, at most 1048576 are allowed"),
    ],
)  # fmt: skip
def test_a_broken_text_is_told_at_its_place(text: str | bytes, message: str) -> None:
    assert problems(text)[0] == message


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = "name: 5\nque: x\nroles:\n  a: {run: hi, replica: 2, workload: m:C}\n  b: {run: hi, start_after: [c]}\nretry: no\n"
    assert [problem.split(": ")[1] for problem in problems(text)] == [
        "name", "que", "roles.a", "roles.a.replica", "roles.b.start_after[0]", "retry",
    ]  # fmt: skip


def test_the_caret_stands_under_the_place() -> None:
    with pytest.raises(JobFileError) as caught:
        read_job("name: t\nroles:\n  a: {run: hi, replica: 2}\n", filename="job.yaml")
    assert caught.value.problems[0].render().splitlines() == [
        "job.yaml:3:16: roles.a.replica: unknown field; did you mean 'replicas'?",
        "      a: {run: hi, replica: 2}",
        "                   ^",
    ]


@pytest.mark.parametrize(
    ("roles", "top", "message"),
    [
        (["a: {run: hi, start_after: b}", "b: {run: hi, start_after: [a]}"], "", "a circle: a after b after a"),
        (["a: {workload: m:A}", "b: {workload: m:B}"], "edges: [a.x -> b.y, b.z -> a.x]\n", "the data flow is a circle: a -> b -> a; feedback goes by 'weights:' or through the loop"),
        (["a: {workload: m:A}"], "edges: [a.x -> b.y]\n", "no role or stream 'b'; there is a"),
        (["a: {workload: m:A}"], "edges: [a -> a.x]\n", "'a' names no operation; write a.OP"),
        (["a: {workload: m:A}"], "weights: [{from: a, to: b}]\n", "no role 'b'; there is a"),
        (["a: {workload: m:A}"], "weights: [{from: a, to: a}]\n", "a role cannot send weights to itself"),
        (["a: {run: hi}"], "success_when: [b]\n", "no role 'b'; there is a"),
        (["a: {run: hi}"], "success_when: loop\n", "no role is a loop; name roles, or say all"),
        (["a: {run: hi}"], "streams: {s: {stale: {versions: 1}}}\n", "'stale' counts model versions, but no weights edge makes any; add 'weights:'"),
        (["a: {run: hi}"], "streams: {a: {}}\n", "a role has the same name; rename one"),
        (["a: {run: hi, collocate: [{role: b, level: node}]}", "b: {run: hi, apart: [{role: a, level: rack}]}"], "", "apart from 'a' at level rack, but collocated with it there; drop one of the two"),
        (["a: {run: hi, collocate: [b]}", "b: {run: hi, collocate: [c]}", "c: {run: hi, apart: [a]}"], "", "apart from 'a' at level device, but collocated with it there; drop one of the two"),
        (["a: {run: hi, resources: {gpus: 0.7}, collocate: [{role: b, share: fraction}]}", "b: {run: hi, resources: {gpus: 0.5}}"], "", "0.7 + 0.5 of a device is more than one; lower 'gpus', or take turns with share: lease"),
        (["a: {run: hi}"], "queue: a//b\n", "'a//b' is not a queue; a queue is a path such as research/rl"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(roles: list[str], top: str, message: str) -> None:
    found = problems(job(*roles, top=top))
    assert len(found) == 1
    assert found[0].endswith(f": {message}")


def test_roles_collocated_on_a_node_may_be_apart_on_its_devices() -> None:
    text = job("a: {run: hi, collocate: [{role: b, level: node}], apart: [{role: b, level: device}]}", "b: {run: hi}")
    role = read_job(text, filename="j").role("a")
    assert [(near.role, near.level) for near in (*role.collocate, *role.apart)] == [("b", "node"), ("b", "device")]


def test_yaml_1_2_keeps_words_and_numbers_as_written() -> None:
    spec = read_job(job("a: {run: hi, env: {Y: yes, V: 3.10, O: 08, E: 1e3, T: true, N: 1_000}}"), filename="j")
    assert dict(spec.role("a").env) == {"Y": "yes", "V": "3.10", "O": "08", "E": "1e3", "T": "true", "N": "1_000"}
    assert read_job(job(top="retry: 08\n"), filename="j").retry == 8


def test_aliases_and_merge_keys_work() -> None:
    text = "name: t\nroles:\n  a: &base {run: hi, replicas: 3, retry: 1}\n".replace(", retry: 1", "")
    text += "  b: {<<: *base, replicas: 2}\n  c: *base\n"
    spec = read_job(text, filename="j")
    assert [(role.run, role.replicas_min) for role in spec.roles] == [(("hi",), 3), (("hi",), 2), (("hi",), 3)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9)), "more than 20000 values"),
        ("a: " + "[" * 20_000, "nested more than 32 deep"),
        ("a: [" + ("[" + "1, " * 1_000 + "], ") * 30 + "]", "more than 20000 values"),
        ("a:\n" + "- 1\n" * 30_000, "job.yaml:2:1: a: expected at most 1000 entries, got a list with more"),
        ("a: {" + "".join(f"k{n}: 1, " for n in range(30_000)) + "}", "job.yaml:1:4: a: expected at most 1000 entries"),
        ("a: " + "x" * 300_000, "a text of more than 262144 characters"),
        ("k" * 300 + ": 1", "a key of more than 256 characters"),
        ("name: a\nroles: {" + "".join(f"r{n}: {{run: x}}, " for n in range(65)) + "}", "at most 64"),
        ("a: &x 1\nb: [" + "*x, " * 600 + "]\nc: [" + "*x, " * 600 + "]", "more than 1000 aliases"),
    ],
)  # fmt: skip
def test_a_hostile_text_is_refused_soon(text: str, words: str) -> None:
    began_s = time.process_time()
    assert words in problems(text)[0]
    assert time.process_time() - began_s < 2.0  # a tenth of that on a machine of today; unbounded, each takes minutes


def test_json_is_read_with_places_tabs_and_escapes() -> None:
    spec = read_job(
        '{\n\t"name": "t",\n\t"labels": {"x": "\\ud83d\\ude00 a\\/b"},\n\t"roles": {"a": {"run": "hi"}}\n}',
        filename="j",
    )
    assert dict(spec.labels) == {"x": "\U0001f600 a/b"}
    misspelt = problems('{\n\t"name": "t",\n\t"rols": {}\n}')
    assert misspelt == ["job.yaml:3:2: rols: unknown field; did you mean 'roles'?"], "it is not missing as well"


def test_what_is_below_a_misspelt_key_is_checked_as_the_field_that_was_meant() -> None:
    text = "name: x\nrols:\n  a: {run: hi, resource: {cpus: -1, gpuz: 1}}\ntime: 1h\nnodes: 2\ndepends: [y]\n"
    assert problems(text) == [
        "job.yaml:2:1: rols: unknown field; did you mean 'roles'?",
        "job.yaml:3:16: rols.a.resource: unknown field; did you mean 'resources'?",
        "job.yaml:3:33: rols.a.resource.cpus: expected a number, at least 0, got '-1'",
        "job.yaml:3:37: rols.a.resource.gpuz: unknown field; did you mean 'gpus'?",
        "job.yaml:4:1: time: unknown field; did you mean 'time_limit'?",
        "job.yaml:5:1: nodes: unknown field; did you mean 'roles.NAME.replicas'?",
        "job.yaml:6:1: depends: unknown field; did you mean 'after'?",
    ]
    both = "name: x\nroles: {a: {run: hi, fial: {limit: x}, fail: {limit: 3/10m}}}\n"
    assert [one.partition(": ")[2] for one in problems(both)] == [
        "roles.a.fial: unknown field; did you mean 'fail'?"
    ], "a field that is there as well is read once"
    assert "job.yaml:1:1: roles: missing; add 'roles:', role name to role, 1 to 64" in problems('{"name": "t"}')


def test_set_changes_fields_and_makes_what_is_missing() -> None:
    spec = read_job(
        FULL,
        filename="j",
        sets=["roles.reward.replicas=5", "labels.run=7", "weights[0].every=4",
              "roles.extra.run=echo a: b", "roles.loop.fail.restart=role"],
    )  # fmt: skip
    assert spec.role("reward").replicas_min == 5
    assert dict(spec.labels) == {"run": "7"}
    assert spec.weights[0].every == 4
    assert spec.role("extra").run == ("echo a: b",)
    assert spec.role("loop").fail.restart == "role"


def test_set_through_an_alias_changes_one_place_only() -> None:
    text = "name: t\nroles:\n  a: &x {run: hi, resources: {cpus: 1}}\n  b: *x\n"
    spec = read_job(text, filename="j", sets=["roles.b.resources.cpus=4"])
    assert [role.res.cpus for role in spec.roles] == [1.0, 4.0]


def test_set_replaces_entries_of_lists_and_fields_that_are_empty() -> None:
    text = job("a: {workload: m:A, env: }", "b: {workload: m:B}", top="edges: [a.x -> b.y]\n")
    spec = read_job(text, filename="j", sets=["edges[0]=b.y -> a.x", "roles.a.env.K=v", "roles.b.mesh={dp: 2}"])
    assert spec.edges == (Edge(source="b.y", target="a.x"),)
    assert (spec.role("a").env, spec.role("b").replicas_min) == ((("K", "v"),), 2)


def test_set_reaches_names_with_dots() -> None:
    spec = read_job(job("rollout.prefill: {run: hi}"), filename="j", sets=["roles.rollout.prefill.replicas=2"])
    assert spec.role("rollout.prefill").replicas_min == 2


def test_the_words_of_a_command_are_those_of_its_own_role() -> None:
    spec = read_job(job("a: {run: [sh, -c, hi]}", "a.run: {run: ho}"), filename="j")
    assert [role.run for role in spec.roles] == [("sh", "-c", "hi"), ("ho",)]


def test_a_problem_of_a_field_is_not_placed_at_the_role_of_that_name() -> None:
    (found,) = problems(job("a.mesh: {run: ho}", "a: {run: hi, replicas: 3, mesh: {dp: 2}}"))
    assert found.startswith("job.yaml:4:29: roles.a.mesh: dp 2 = 2, but 3 instances start")


def test_problems_of_set_name_the_flag_and_come_last() -> None:
    found = problems(job("a: {runn: hi}"), "roles.a.replicas=x", "nonsense", "name.x=1", "roles.a.replica=2")
    assert found[0].startswith("job.yaml:3:7: roles.a.runn")
    assert found[1:] == [
        "--set #1:1:18: roles.a.replicas: expected a whole number from 1 to 100000, got 'x'",
        "--set #2:1:1: 'nonsense' is not path=value; for example roles.trainer.replicas=4",
        "--set #3:1:1: name.x: the field above it is not a mapping",
        "--set #4:1:1: roles.a.replica: unknown field; did you mean 'replicas'?",
    ]


def test_the_older_form_equals_its_conversion_key_by_key() -> None:
    older = """// as it was
{"jobName": "old", "image": "img", "dataDir": "/d", "outputDir": "/o", // the rest
 "taskRoles": [{"name": "ps", "taskNumber": 2, "cpuNumber": 4, "memoryMB": 8192, "gpuNumber": 0, "command": "python ps.py"},
               {"taskNumber": 3, "cpuNumber": 2, "memoryMB": 512, "gpuNumber": 1, "command": "python w.py"}]}"""
    older = older.partition("\n")[2]
    newer = """
name: old
image: img
data: /d
output: /o
roles:
  ps: {replicas: 2, resources: {cpus: 4, memory: 8192MiB, gpus: 0}, run: python ps.py}
  task1: {replicas: 3, resources: {cpus: 2, memory: 512MiB, gpus: 1}, run: python w.py}
"""
    assert read_job(older, filename="old.json") == read_job(newer, filename="new.yaml")


def test_mistakes_in_the_older_form_speak_of_its_own_keys() -> None:
    text = '{"jobName": "t",\n "retryCount": 1,\n "taskRoles": [{"taskNumbr": 2,\n "memoryMB": "x", "command": "c"}]}'
    assert problems(text) == [
        "job.yaml:2:2: retryCount: unknown field; fields: jobName, image, dataDir, outputDir, taskRoles",
        "job.yaml:3:17: taskRoles[0].taskNumbr: unknown field; did you mean 'taskNumber'?",
        "job.yaml:4:14: taskRoles[0].memoryMB: 'xMiB' is not a size with a unit; for example 512MiB",
    ]


def test_a_torchrun_line_is_taken_apart_and_other_text_goes_to_the_shell() -> None:
    spec = read_job(
        job(
            "a: {run: torchrun --nproc-per-node 2 t.py --lr 1e-3}", "b: {run: 'echo $HOME | wc'}", "c: {run: [ls, -l]}"
        ),
        filename="j",
    )
    assert [(role.run, role.shell) for role in spec.roles] == [
        (("torchrun", "--nproc-per-node", "2", "t.py", "--lr", "1e-3"), False),
        (("echo $HOME | wc",), True),
        (("ls", "-l"), False),
    ]


def test_an_elastic_mesh_has_the_size_of_the_fewest() -> None:
    role = read_job(job('a: {run: hi, replicas: {min: 2, max: 8}, mesh: {dp: "*", tp: 2}}'), filename="j").role("a")
    assert (role.mesh, role.elastic_axis, role.replicas_max) == ((("dp", 1), ("tp", 2)), "dp", 8)


def test_a_built_spec_is_held_to_the_same_rules() -> None:
    spec = JobSpec(name="t", roles=(RoleSpec(name=read_job(job(), filename="j").roles[0].name),))
    assert [str(problem) for problem in problems_of(spec)] == [
        "job: roles.a: needs 'workload' or 'run'; for example workload: module:Class, or run: python train.py"
    ]


def test_five_errors_in_two_hundred_lines_are_found_fast() -> None:
    roles = [
        f"r{i}: {{run: hi, replicas: {i + 1}, resources: {{cpus: 1, memory: 1GiB}}, env: {{A: b}}}}" for i in range(60)
    ]
    lines = [part for role in roles for part in (role, "", "# words")]
    text = job(*[line for line in lines if line], top="retry: x\npriorty: 1\ngrace: 5\ngang: al\nqueue: ''\n")
    began = time.process_time()
    assert len(problems(text)) == 5
    assert time.process_time() - began < 4.0  # unbounded, each takes minutes or all memory


def test_the_json_schema_is_json_and_knows_every_field() -> None:
    from rota.service.jobfile.models import JobPart, json_schema

    schema = json.loads(json.dumps(json_schema()))
    assert set(schema["properties"]) == set(JobPart.by_name())
