"""What a stranger with the documents alone tries: other methods, other characters, other numbers, names of nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from standing import HELLO, Standing, listening, with_service
from test_cli import NO_SERVICE, Done, own_home, rota, with_cli
from test_demo import kill, outcome
from tests.makers import format_line

from rota.runtime import image
from rota.runtime.output import log_name
from rota.service import demo
from rota.service.api import body_of
from rota.service.cli.verbs import run
from rota.service.client import Client
from rota.service.control.changes import read_queues
from rota.service.demo import KILL_STEPS
from rota.service.jobfile.reader import read_job
from rota.service.offline import missing_names
from rota.spec.errors import BadInput, JobFileError, NotAllowed, UnknownName
from rota.spec.events import JobEnded
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState

__all__ = ["own_home"]  # a fixture of every test here


async def sent(service: Standing, method: str, path: str, text: str) -> httpx.Response:
    """A body as it is written: a client would not write these."""
    return await service.http.request(
        method, f"/api/v1{path}", content=text, headers={"Content-Type": "application/json"}
    )


def test_head_answers_what_get_does_without_its_body(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        async with listening(service) as http, asyncio.timeout(20):
            for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/api/v1/jobs/hello-1"):
                whole, head = await http.get(path), await http.head(path)
                assert (head.status_code, head.content) == (200, b""), path
                assert head.headers["content-type"] == whole.headers["content-type"]
            assert head.headers["etag"] == whole.headers["etag"]
            assert (await http.head("/api/v1/jobs/nope")).status_code == 404
            endless = await http.head("/api/v1/events", params={"follow": True})
            assert endless.headers["content-type"].startswith("text/event-stream")
            assert (await http.head("/api/v1/jobs", headers={"Authorization": ""})).status_code == 401
        assert service.app.streams == 0

    with_service(tmp_path, test)


def test_head_spends_no_code_of_the_login(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        page = f"/login?code={(await service.http.post('/api/v1/login/code')).json()['code']}"
        head = await service.http.head(page)
        assert (head.status_code, head.headers["allow"], "set-cookie" in head.headers) == (405, "GET, POST", False)
        assert (await service.http.get(page)).status_code == 303

    with_service(tmp_path, test)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/api/v1/jobs/hello-1", "GET, HEAD, PATCH"),
        ("OPTIONS", "/api/v1/jobs", "GET, HEAD, POST"),
        ("GET", "/api/v1/jobs:plan", "POST"),
        ("POST", "/", "GET, HEAD"),
        ("POST", "/api/v1/queues", "GET, HEAD, PUT"),
    ],
)
def test_a_method_that_a_path_has_not_is_told_which_it_has(
    tmp_path: Path, method: str, path: str, allowed: str
) -> None:
    async def test(service: Standing) -> None:
        answer = await service.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["code"] == "INVALID"

    with_service(tmp_path, test)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time_limit_s": -5.0}, "time_limit: '-5s' is not a duration"),
        ({"priority": 200}, "priority: expected a whole number from -1 to 100, got '200'"),
        ({"retry": -1}, "retry: expected a whole number from 0"),
        ({"grace_s": -3.0}, "grace: '-3s' is not a duration"),
        ({"cpus": -30.0}, "roles.main.resources.cpus: expected a number, at least 0"),
        ({"gpus": -4.0}, "roles.main.resources.gpus: expected a number, at least 0"),
        ({"memory_bytes": -1}, "roles.main.resources.memory: '-1B' is not a size"),
    ],
    ids=str,
)
def test_a_built_spec_has_the_ranges_of_a_job_file(tmp_path: Path, change: dict[str, object], said: str) -> None:
    """A negative time limit was acknowledged, ended the service, and every one that was started after it."""

    async def test(service: Standing) -> None:
        await service.submit()
        spec = (await service.get("/jobs/hello-1/spec"))["spec"]
        assert (await service.http.post("/api/v1/jobs", json={"spec": spec})).status_code == 201
        spec["roles"][0]["res"] |= {name: value for name, value in change.items() if name in spec["roles"][0]["res"]}
        spec |= {name: value for name, value in change.items() if name in spec}
        for path in ("/api/v1/jobs", "/api/v1/jobs:plan"):
            answer = await service.http.post(path, json={"spec": spec})
            assert (answer.status_code, said in answer.text) == (422, True), answer.text

    with_service(tmp_path, test)


def test_what_no_store_takes_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        spec = (await service.get("/jobs/hello-1/spec"))["spec"]

        def changed(old: str, new: str) -> str:
            text = json.dumps({"spec": spec})
            assert old in text
            return text.replace(old, new, 1)

        gpus = '"gpus": 2.0' if '"gpus": 2.0' in json.dumps(spec) else '"gpus": 2'
        wrong = [
            ("POST", "/jobs", changed(gpus, '"gpus": Infinity')),
            ("POST", "/jobs:plan", changed(gpus, '"gpus": NaN')),
            ("POST", "/jobs", changed('"hi"', '"\\ud800"')),
            ("POST", "/jobs", changed('"hi"', '"\\u0000"')),
            ("POST", "/jobs", '{"source": "name: x", "\\ud800": 1}'),
            ("POST", "/jobs", json.dumps({"source": HELLO, "workdir": "/tmp/\0"})),
            ("PATCH", "/jobs/hello-1", '{"changes": {"labels.a": "\\ud800"}}'),
            ("PATCH", "/jobs/hello-1", '{"changes": {"\\ud800": 1}}'),
            ("PATCH", "/jobs/hello-1", '{"changes": {"labels.": "x"}}'),
            ("PUT", "/queues", '{"queues": [{"path": "default", "weight": Infinity}]}'),
        ]
        for method, path, text in wrong:
            answer = await sent(service, method, path, text)
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID"), (text, answer.text)
        kept = changed('"hi"', '"\\\\u0000"')  # six characters that a shell may print
        assert (await sent(service, "POST", "/jobs", kept)).status_code == 201
        assert (await service.http.get("/api/v1/jobs", params={"since_s": "nan"})).status_code == 422

    with_service(tmp_path, test)


def test_a_queue_that_is_not_there_is_refused_at_every_door_that_names_one(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        asked: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", "/tokens", {"queue": "nope"}),
            ("POST", "/webhooks", {"url": "https://192.0.2.1/", "queue": "nope"}),
            ("PUT", "/users/ann", {"grants": [{"queue": "nope", "role": "user"}]}),
            ("PATCH", "/jobs/hello-1", {"changes": {"queue": "nope"}}),
            ("POST", "/jobs", {"source": HELLO + "queue: nope\n"}),
        ]
        for method, path, body in asked:
            answer = await service.http.request(method, f"/api/v1{path}", json=body)
            assert (answer.status_code, "'nope'" in answer.json()["detail"]) == (404, True), (path, answer.text)
            jobs = path.startswith("/jobs")
            assert answer.json()["code"] == ("UNKNOWN_QUEUE" if jobs else "UNKNOWN_NAME")
        port = await service.http.post("/api/v1/webhooks", json={"url": "http://example.com:99999/"})
        assert port.status_code == 422 and "99999" in port.json()["detail"]

    with_service(tmp_path, test)


def test_a_dry_run_that_is_refused_is_no_dry_run_in_the_audit(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        token = (await service.http.post("/api/v1/tokens", json={"role": "viewer"})).json()["token"]
        viewer = {"Authorization": f"Bearer {token}"}
        tree = {"queues": [{"path": "default", "weight": 2.0}], "dry_run": True}
        drain = await service.http.post("/api/v1/nodes/r0n0:drain", json={"dry_run": True}, headers=viewer)
        apply = await service.http.put("/api/v1/queues", json=tree, headers=viewer)
        assert (drain.status_code, apply.status_code) == (403, 403)
        found = [(one["status"], "dry_run" in one) for one in service.app.audit.newest(2)]
        assert found == [(403, False), (403, False)]

    with_service(tmp_path, test)


def test_one_queue_and_the_totals_of_the_cluster_have_addresses_of_their_own(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        tree = [{"path": "default"}, {"path": "lab"}, {"path": "lab/rl", "weight": 3.0}]
        assert (await service.http.put("/api/v1/queues", json={"queues": tree})).status_code == 200
        await service.submit(HELLO + "queue: lab/rl\n")
        await service.until("hello-1", JobState.ADMITTED)
        one = await service.get("/queues/lab/rl")
        assert (one["kind"], one["path"], one["weight"], one["used_gpus"]) == ("Queue", "lab/rl", 3.0, 2.0)
        assert one in [{"api": "rota/v1", "kind": "Queue", **row} for row in (await service.get("/queues"))["items"]]
        missing = await service.http.get("/api/v1/queues/lab/lr")
        assert (missing.status_code, missing.json()["hint"]) == (404, "did you mean 'lab/rl'?")
        totals = await service.get("/cluster")
        assert totals.pop("kind") == "Cluster" and totals.pop("api") == "rota/v1"
        assert totals == (await service.get("/status"))["cluster"] and totals["gpus_used"] == 2

    with_service(tmp_path, test)


def test_words_that_are_no_text_are_refused_as_input() -> None:
    done = rota("show", "job-\udcff")  # as Python reads the byte 0xff of a command line
    assert (done.status, done.err) == (2, "rota: not UTF-8: 'show job-\\udcff'\n")
    told = rota("show", "\udcff", "--json")
    assert (told.status, told.document["code"]) == (2, "INVALID")


@pytest.mark.slow
def test_an_output_of_seven_bits_shows_what_it_can(tmp_path: Path) -> None:
    (tmp_path / "\u00e9.yaml").write_text(HELLO)
    words = [sys.executable, "-m", "rota", "run", "\u00e9.yaml", "--check"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"\\xe9.yaml: hello is valid, 1 role, 1 instance\n")


def test_a_nought_in_a_flag_is_a_number_and_an_attempt_that_never_was_is_told(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        folder = service.app.home.job(JobId("hello-1")).logs
        folder.mkdir(parents=True, exist_ok=True)
        (folder / log_name("main", 0)).write_text(format_line(1.0, 1, 1, "out", "said"))
        assert (await ask("logs", "hello-1")).out == "main/0 | said\n"
        assert (await ask("logs", "hello-1", "--tail", "0")).out == ""
        for words in (("audit", "--limit", "0"), ("report", "--since", "0s")):
            assert (await ask(*words)).status == 2, words
        for attempt in ("0", "2"):
            done = await ask("failures", "hello-1", "--attempt", attempt)
            assert (done.status, f"hello-1 has no attempt {attempt}" in done.err) == (2, True)

    with_cli(tmp_path, test)


# -- the Python client -------------------------------------------------------------------------------------------------


def test_a_command_may_be_one_text_for_a_shell_and_an_empty_one_is_named() -> None:
    made = body_of(None, command="echo 'a b' | wc -w", res={"gpus": 1})
    job = read_job(made["source"], filename="command", sets=made["sets"])
    assert (job.name, job.roles[0].run, job.roles[0].shell) == ("echo", ("echo 'a b' | wc -w",), True)
    assert job.roles[0].res.gpus == 1
    for empty in ("", " ", [], ()):
        with pytest.raises(BadInput, match="the command is empty"):
            body_of(None, command=empty)


def test_a_handle_tells_its_job_its_folder_and_the_lines_of_a_role(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        async with listening(service) as http:
            token = http.headers["authorization"].split()[1]

            def ask() -> tuple[str, Path, list[Any]]:
                with Client(str(http.base_url).rstrip("/"), token) as client:
                    job = client.run(command="true")
                    with pytest.raises(UnknownName, match="no role 'other'"):
                        list(job.logs(role="other"))
                    return repr(job), job.output_dir, list(job.logs(role="main"))

            shown, folder, lines = await asyncio.to_thread(ask)
        assert shown.startswith("<true-1 SUBMITTED") and lines == []
        assert folder == service.app.home.job(JobId("true-1")).output

    with_service(tmp_path, test)


# -- rota run --check --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_check_names_a_queue_that_takes_no_jobs_beside_every_other_mistake(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text('name: x\nqueue: defalt\nroles:\n  main: {workload: "no_such_module:X"}\n')
    (tmp_path / "good.yaml").write_text(HELLO)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        done: Done = await ask("run", str(tmp_path / "job.yaml"), "--check")
        assert done.status == 2 and "job.yaml:2:8: queue: no queue 'defalt' takes jobs; did you mean" in done.err
        assert "job.yaml:4:20: roles.main.workload: ModuleNotFoundError" in done.err
        (tmp_path / "names.yaml").write_text(
            "name: a\nafter: [nojob]\nsecrets: [KEY]\nroles: {main: {run: hostname}}\n"
        )
        names = await ask("run", str(tmp_path / "names.yaml"), "--check")
        assert names.status == 2 and "names.yaml:2:9: after[0]: no job 'nojob'; submit that job first" in names.err
        assert "names.yaml:3:11: secrets[0]: no secret 'KEY'; set it: rota secret set KEY" in names.err
        for _ in range(3):
            await service.submit(HELLO)
        await service.play_start("hello-1", "main/0")
        service.as_master("hello-1", JobEnded(state=JobState.FAILED, reason=Reason.EXIT_NONZERO))
        await service.until("hello-1", JobState.FAILED)
        afters = "name: a\nqueue: nope\nafter: [hello-, hello, hello-1, helo]\nroles: {main: {run: hostname}}\n"
        (tmp_path / "after.yaml").write_text(afters)
        found = await ask("run", str(tmp_path / "after.yaml"), "--check")
        assert found.status == 2 and "after.yaml:2:8: queue: no queue 'nope' takes jobs" in found.err
        assert "after[0]: no job 'hello-'; did you mean 'hello'?" in found.err
        assert "after[1]" not in found.err, "the newest job of a name, as at the submission"
        assert "after[2]: hello-1 had to succeed first; it ended as FAILED (EXIT_NONZERO)" in found.err
        assert "after[3]: no job 'helo'; did you mean 'hello'?" in found.err
        flag = await ask("run", str(tmp_path / "good.yaml"), "--check", "-q", "nope")
        assert flag.status == 2 and "-q nope: queue: no queue 'nope' takes jobs; queues: default" in flag.err
        assert (await ask("run", str(tmp_path / "good.yaml"), "--check", "--json")).document["valid"]

    with_cli(tmp_path, test)


def test_check_without_a_service_of_this_home_knows_no_queues(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)
    assert rota("run", "job.yaml", "--check", "-q", "prod").status == 0
    assert rota("run", "job.yaml", "--check", "--server", NO_SERVICE).status == 3


class Refusing:
    """A service that answers for queues and refuses the rest."""

    def queues(self) -> dict[str, Any]:
        return {"items": [{"path": "default", "parent": None, "state": "open"}]}

    @property
    def accounts(self) -> Any:
        raise NotAllowed("not for this token")


def test_a_question_that_the_service_refuses_hides_no_finding_of_another() -> None:
    def missing(queue: str, named: bool) -> list[Any]:
        text = f"name: a\nqueue: {queue}\nafter: [exp]\nsecrets: [K]\nroles: {{main: {{run: hostname}}}}\n"
        client: Any = Refusing()
        return missing_names(client, read_job(text, filename="a.yaml"), named=named)

    assert [one.path for one in missing("nope", named=True)] == [("queue",)]
    assert missing("default", named=False) == []
    with pytest.raises(NotAllowed):
        missing("default", named=True)


def test_check_looks_for_the_folder_of_a_job_here_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"name: a\nworkdir: code-there\n{HELLO.partition(chr(10))[2]}")
    done = rota("run", "job.yaml", "--check")
    assert done.status == 2 and f"workdir: {tmp_path}/code-there is not a folder on this machine" in done.err

    async def test(_: Standing, ask: Callable[..., Any]) -> None:
        elsewhere: Done = await ask("run", str(tmp_path / "job.yaml"), "--check")
        assert elsewhere.status == 0 and "code-there is not here" in elsewhere.err

    with_cli(tmp_path, test)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 404 Not Found\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n<html>"])
def test_check_does_not_depend_on_what_else_listens_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)
    monkeypatch.setattr(run, "LOOK_S", 0.1)

    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if not answer:
            await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(strange, "127.0.0.1", 0)
        async with server, asyncio.timeout(20):
            monkeypatch.setenv("ROTA_PORT", str(server.sockets[0].getsockname()[1]))
            done = await asyncio.to_thread(rota, "run", "job.yaml", "--check")
            assert (done.status, done.err) == (0, "")

    asyncio.run(main())


# -- rota demo ---------------------------------------------------------------------------------------------------------


def test_the_summary_of_the_demo_has_a_line_for_each_kill_in_order() -> None:
    kills = [kill(step.victim, wall_s=10.0 * n) for n, step in enumerate(KILL_STEPS)]
    failures = [
        {
            "seen_at": f"1970-01-01T00:00:{10 * n:02}.100Z",
            "instance": step.victim,
            "reason": "SIGNALLED",
            "level": "process",
            "scope": [{"instance": step.victim}],
            "seconds": 3.0,
        }
        for n, step in enumerate(KILL_STEPS)
        if step.victim != "master"
    ]
    told: list[str] = []
    demo._print_summary(outcome(kills=kills, failures=failures), told.append)
    lines = told[: len(KILL_STEPS)]
    assert [step.victim in line for step, line in zip(KILL_STEPS, lines, strict=True)] == [True] * len(KILL_STEPS)
    assert lines[-1] == "1970-01-01T00:00:20.000Z  master killed -> pid 8 in its place, no instance restarted, 2.0 s"


def test_a_mistake_of_the_queue_is_reported_beside_the_others_of_the_file_also_by_a_submission(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO.replace("\nroles", "\nqueue: defalt\nretry: -1\nroles"))

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        for words in ([], ["--check"], ["--dry-run"]):
            done: Done = await ask("run", str(tmp_path / "job.yaml"), "-d", *words)
            assert done.status == 2 and "job.yaml:2:8: queue: no queue 'defalt' takes jobs; did you mean" in done.err
            assert "job.yaml:3:8: retry: expected a whole number from 0 to 1000" in done.err

    with_cli(tmp_path, test)


def test_a_submission_reports_all_names_that_are_missing_at_once_and_one_alone_by_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "TOOLS", ())

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        async def refused(*sets: str) -> tuple[int, str, dict[str, str]]:
            answer = await service.http.post("/api/v1/jobs", json={"source": HELLO, "sets": list(sets)})
            said = answer.json()
            return answer.status_code, said["code"], {one["loc"]: one["message"] for one in said.get("errors", ())}

        wrong = ("queue=defalt", "secrets=[KEY, TOKEN]", "after=[nojob]", "workdir=/not/there")
        status, code, found = await refused(*wrong, "image=registry/x:1")
        assert (status, code) == (422, "INVALID") and found.keys() == {
            "queue", "secrets[0]", "secrets[1]", "after[0]", "workdir", "image"
        }  # fmt: skip
        assert found["queue"] == "queue 'defalt' does not exist" and found["secrets[1]"] == "no secret 'TOKEN'"
        assert await refused("queue=defalt") == (404, "UNKNOWN_QUEUE", {})
        assert await refused("secrets=[KEY]") == (404, "UNKNOWN_NAME", {})
        (tmp_path / "job.yaml").write_text(HELLO.replace("\nroles", "\nqueue: defalt\nsecrets: [KEY]\nroles"))
        done: Done = await ask("run", str(tmp_path / "job.yaml"), "-d")
        assert done.status == 2 and "job.yaml:2:8: queue: queue 'defalt' does not exist" in done.err
        assert "job.yaml:3:11: secrets[0]: no secret 'KEY'; set it: rota secret set KEY" in done.err

    with_cli(tmp_path, test)


def test_a_closed_queue_refuses_jobs_and_a_stopped_one_keeps_them_waiting(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO)
    tree = "- {path: default}\n- {path: team, state: STATE}\n- {path: team/a}\n"

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        async def apply(state: str) -> None:
            (tmp_path / "queues.yaml").write_text(tree.replace("STATE", state))
            assert (await ask("queues", "apply", str(tmp_path / "queues.yaml"))).status == 0

        async def is_closed() -> bool:
            return "QUEUE_CLOSED" in (await ask("explain", "hello-1")).out

        run = ["run", str(tmp_path / "job.yaml"), "-d", "-q", "team/a"]
        await apply("stopped")
        assert (await ask(*run)).out == "hello-1\n"
        assert (await service.until("hello-1", JobState.QUEUED))["state"] == "QUEUED"
        await service.until_true(is_closed)
        waits = json.loads((await ask("explain", "hello-1", "--json")).out)
        assert waits["why"]["fields"] == {"queue": "team", "state": "stopped"}
        assert waits["why"]["text"].startswith(
            "Queue team is stopped and starts none of its jobs; an admin of it opens"
        )
        assert [waits["estimate"][key] for key in ("p10", "p50", "p90")] == [None] * 3, "it starts when it is opened"
        for state in ("closed", "draining"):
            await apply(state)
            why = f"queue 'team' is {state} and takes no new jobs"
            for words in ([], ["--check"], ["--dry-run"]):
                done: Done = await ask(*run, *words)
                assert done.status == 2 and why in done.err and "rota queues" in done.err, words
            refused = await service.http.post("/api/v1/jobs", json={"source": HELLO, "sets": ["queue=team/a"]})
            assert (refused.status_code, refused.json()["code"]) == (409, "QUEUE_CLOSED")
            assert (await ask("run", str(tmp_path / "job.yaml"), "-d")).status == 0
            moved = await ask("set", "hello-2", "queue=team/a")
            assert moved.status == 2 and why in moved.err and moved.err.count("rota queues") == 1
            assert (await ask("set", "hello-1", "queue=team/a")).status == 0, "it is in it already"
            if state == "closed":
                assert (await service.until("hello-1", JobState.QUEUED))["state"] == "QUEUED"
        await service.until("hello-1", JobState.ADMITTED)  # what a draining queue has already, it starts

    with_cli(tmp_path, test)


def test_of_two_who_change_the_queues_at_once_the_second_is_refused_and_sees_what_the_first_did(tmp_path: Path) -> None:
    tree = "- {path: default, weight: WEIGHT}\n- {path: nlp, limit: {gpus: LIMIT}}\n"
    file = tmp_path / "queues.yaml"

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        async def apply(weight: int, gpus: int, *words: str) -> Done:
            file.write_text(tree.replace("WEIGHT", str(weight)).replace("LIMIT", str(gpus)))
            return await ask("queues", "apply", str(file), *words)

        assert (await apply(1, 4)).status == 0
        planned = await apply(5, 4, "--dry-run")
        assert "  default weight: 1.0 -> 5.0\nin place of version 2, which local applied" in planned.out
        assert planned.out.endswith("--if-version 2\n")
        assert (await apply(1, 4)).status == 0, "the same once more is no change, and so no version"
        assert (await service.http.get("/api/v1/queues")).headers["etag"] == '"2"'
        assert "  nlp limit: 4 GPUs -> 3 GPUs\n" in (await apply(1, 3, "--if-version", "2")).out
        audit = (await ask("audit", "--limit", "2")).out
        assert "nlp limit 4 GPUs -> 3 GPUs" in audit and "as before" in audit
        refused = await apply(5, 4, "--if-version", "2")
        assert refused.status == 2 and "version 3, applied by local, not" in refused.err
        assert "since then: nlp limit 4 GPUs -> 3 GPUs" in refused.err and "--if-version 3" in refused.err
        assert [(one["limit_gpus"], one["weight"]) for one in (await service.get("/queues"))["items"]] == [
            (None, 1),
            (3, 1),
        ]
        assert (await apply(5, 3, "--if-version", "3")).status == 0
        at_once = await asyncio.gather(
            *(
                service.http.put(
                    "/api/v1/queues",
                    json={"queues": [{"path": "default", "weight": weight}, {"path": "nlp"}]},
                    headers={"If-Match": '"4"'},
                )
                for weight in (6, 7, 8)
            )
        )
        assert sorted(one.status_code for one in at_once) == [200, 412, 412]
        trees = [[{"path": "default", "weight": weight}, {"path": "nlp"}] for weight in (11, 12, 13)]
        at_once = await asyncio.gather(*(service.http.put("/api/v1/queues", json={"queues": one}) for one in trees))
        said = sorted((one.json() for one in at_once), key=lambda one: one["version"])
        assert [one["version"] for one in said] == [5, 6, 7], "each names the tree that it replaced"
        (first,), (second,), (third,) = (one["fields"] for one in said)
        assert first["after"] == second["before"] and second["after"] == third["before"]

    with_cli(tmp_path, test)


def test_a_path_of_a_queue_that_cannot_be_read_is_one_mistake() -> None:
    with pytest.raises(JobFileError) as refused:
        read_queues("- {path: 'a/'}\n", filename="q.yaml")
    assert [one.loc for one in refused.value.problems] == ["queues[0].path"]


def test_every_mistake_of_a_tree_of_queues_is_reported_in_one_form(tmp_path: Path) -> None:
    wrong = "- {path: a, stat: open}\n- {path: b, weight: 0}\n- {paht: c}\n- {path: x/y, priority: -1}\n"
    for text in (wrong, "queues:\n" + wrong):
        with pytest.raises(JobFileError) as refused:
            read_queues(text, filename="q.yaml")
        assert [(one.loc, one.message) for one in refused.value.problems] == [
            ("queues[0].stat", "unknown field"),
            ("queues[1].weight", "0.0 is not above 0"),
            ("queues[2].paht", "unknown field"),
            ("queues[3].priority", "expected a whole number, at least 0, got '-1'"),
        ]
    with pytest.raises(JobFileError) as alone:
        read_queues("- {path: a, stat: open}\n- {path: x/y}\n", filename="q.yaml")
    assert [one.loc for one in alone.value.problems] == ["queues[0].stat", "queues[1].path"], (
        "a parent that is not there"
    )
