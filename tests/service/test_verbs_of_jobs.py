"""The verbs that list, change and end jobs: several at once, their order, their columns, their form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML
from standing import HELLO, Standing, with_service
from test_cli import own_home, rota, with_cli

from rota.job import core
from rota.service.cli.verbs import jobs
from rota.service.cli.verbs.logs import event_text
from rota.service.views.installation import Installation
from rota.spec.errors import BadInput, Conflict, TimedOut
from rota.spec.states import JobState

assert own_home  # the fixture of every test here, too


@pytest.mark.parametrize(
    ("verb", "state"), [("pause", {"PAUSED"}), ("resume", {"QUEUED"}), ("stop", {"STOPPING", "CANCELLED"})]
)
def test_several_jobs_are_changed_at_once_and_one_that_refuses_stops_no_other(
    verb: str, state: set[str], tmp_path: Path
) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        source = "name: {}\nroles: {{main: {{run: [x], replicas: 2, resources: {{gpus: 4}}}}}}\n"
        names = [(await service.submit(source.format(name)))["id"] for name in ("fills", "one", "two")][1:]
        await service.until("fills-1", JobState.ADMITTED)
        if verb == "resume":
            assert (await ask("pause", *names)).status == 0
        done = await ask(verb, names[0], "none", names[1], "--json")
        assert (done.status, done.document["kind"], done.document["action"]) == (2, "ActionList", verb)
        rows = done.document["items"]
        assert [(row["job"], row["done"]) for row in rows] == [(names[0], True), ("none", False), (names[1], True)]
        assert all(row["state"] in state for row in rows if row["done"])
        assert (rows[1]["code"], "no job" in rows[1]["text"]) == ("UNKNOWN_NAME", True)
        alone = await ask(verb, "none", "--json")
        assert (alone.status, alone.document["kind"]) == (2, "Error")
        assert "missing JOB" in (await ask(verb)).err

    with_cli(tmp_path / "service", test)


def test_a_short_name_is_that_of_the_job_so_named_and_of_the_one_that_lives() -> None:
    ended = {"sec-1": True, "sec-2": False, "second-1": False, "third-1": True, "third-2": True}
    submitted = SimpleNamespace(uid="")
    jobs: Any = {job: SimpleNamespace(id=job, ended=over or None, submitted=submitted) for job, over in ended.items()}
    find = Installation(jobs=jobs).find
    assert [find(one).id for one in ("sec", "second", "sec-1", "third-2")] == ["sec-2", "second-1", "sec-1", "third-2"]
    for short in ("se", "third"):  # two live, and none
        with pytest.raises(BadInput, match=r"fits \d jobs"):
            find(short)


SORTED = {
    "submitted": "e-1 d-1 b-1 a-2 a-1 c-1",
    "name": "a-2 a-1 b-1 c-1 d-1 e-1",
    "priority": "c-1 e-1 d-1 b-1 a-2 a-1",
    "queue": "e-1 d-1 b-1 a-2 a-1 c-1",
    "state": "c-1 e-1 d-1 b-1 a-2 a-1",
}


async def six_jobs(service: Standing) -> None:
    """The first one is urgent and has everything; the others wait."""
    asks = "roles: {m: {run: [x], replicas: 2, resources: {gpus: 4}}}"
    for name in ("c", "a", "a", "b", "d", "e"):
        await service.submit(f"name: {name}\npriority: {90 if name == 'c' else 50}\n{asks}")
    await service.until("c-1", JobState.ADMITTED)
    for one in ("a-1", "a-2", "b-1", "d-1", "e-1"):
        await service.until(one, JobState.QUEUED)


def test_a_list_comes_in_the_order_that_is_asked_for_over_all_its_pages(tmp_path: Path) -> None:
    async def pages(service: Standing, sort: str) -> list[str]:
        seen: list[str] = []
        page: dict[str, Any] = {"next": ""}
        while page["next"] is not None:
            page = await service.get("/jobs", sort=sort, limit=2, cursor=page["next"])
            seen += [row["id"] for row in page["items"]]
        return seen

    async def test(service: Standing) -> None:
        await six_jobs(service)
        for sort, order in SORTED.items():
            assert await pages(service, sort) == order.split(), sort
        of_names = (await service.get("/jobs", sort="name", limit=2))["next"]
        for given in ({"sort": "colour"}, {"sort": "queue", "cursor": of_names}, {"cursor": of_names}):
            answer: httpx.Response = await service.http.get("/api/v1/jobs", params=given)
            assert answer.status_code == 422, given

    with_service(tmp_path, test)


def test_ps_asks_the_service_for_the_order_so_a_limit_keeps_the_first(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await six_jobs(service)
        first = (await ask("ps", "--sort", "priority", "--limit", "1", "--json")).document
        assert [row["id"] for row in first["items"]] == ["c-1"]

    with_cli(tmp_path / "service", test)


def test_ps_shows_the_columns_that_are_named_and_wide_all_of_them(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit("labels: {team: a}\n" + HELLO)
        named = (await ask("ps", "--columns", "state,JOB")).out.splitlines()
        assert named[0].split() == ["STATE", "JOB"]
        assert named[-1].split()[1] == "hello-1"
        narrow, wide = [(await ask("ps", "-o", form)).out.splitlines() for form in ("table", "wide")]
        assert wide[0].split()[: len(narrow[0].split())] == narrow[0].split()
        assert "LABELS" in wide[0] and "team=a" in wide[-1] and "LABELS" not in narrow[0]
        assert len(wide) == len(narrow), "a row stays one line"
        wrong = await ask("ps", "--columns", "jb")
        assert (wrong.status, "--columns jb: unknown column\n      did you mean 'job'" in wrong.err) == (2, True)

    with_cli(tmp_path / "service", test)


def test_ps_mine_lists_the_jobs_of_the_user_who_asks(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit()
        assert (await ask("user", "create", "ann", "--role", "admin")).status == 0
        token = (await ask("token", "create", "--user", "ann", "--json")).document["token"]
        headers = {"Authorization": f"Bearer {token}"}
        assert (await service.http.post("/api/v1/jobs", json={"source": HELLO}, headers=headers)).status_code == 201
        shown = [(await ask("ps", "--json", *more)).document["items"] for more in ([], ["--mine"])]
        assert [[row["id"] for row in rows] for rows in shown] == [["hello-2", "hello-1"], ["hello-1"]]
        assert (await ask("ps", "--mine", "--user", "ann")).status == 2

    with_cli(tmp_path / "service", test)


def test_an_unknown_queue_a_job_to_wait_for_a_drained_node_and_a_token_are_said_as_they_are(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        unknown = await ask("ps", "-q", "defualt")
        assert (unknown.status, "no queue 'defualt'\n      did you mean 'default'?" in unknown.err) == (2, True)
        assert "default" in (await ask("ps", "-q", "zzzzzz")).err and (await ask("ps", "-q", "default")).status == 0
        after = await ask("run", "-d", "--after", "nojob", "--", "true")
        assert after.status == 2 and after.err.startswith("--after nojob: ") and "no job 'nojob'" in after.err
        assert (await ask("nodes", "drain", "r0n1", "--dry-run")).out == "r0n1 is healthy and would be drained\n"
        assert (await ask("nodes", "drain", "r0n1", "--yes")).out == "r0n1 is drained\n"
        await service.submit("name: big\nroles: {m: {run: [x], replicas: 2, resources: {gpus: 4}}}")
        await service.until("big-1", JobState.QUEUED)
        while "NODES_DRAINED" not in (shown := (await ask("ps")).out):
            assert "BAD_CELLS" not in shown
        await ask("user", "create", "ann", "--role", "user", "--queue", "default")
        made = (await ask("token", "create", "--user", "ann", "--json")).document
        assert made["role"] == "user", "it may what ann may, and no more"
        [row] = (await ask("token", "ls", "--json")).document["items"]
        assert (row["id"], row["role"]) == (made["id"], "user")

    with_cli(tmp_path / "service", test)


def test_several_nodes_are_marked_by_one_command_or_none_is(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        async def states() -> list[str]:
            return [row["state"] for row in (await service.get("/nodes"))["items"]]

        wrong = await ask("nodes", "cordon", "r0n0", "r0n7")
        assert (wrong.status, await states()) == (2, ["healthy", "healthy"]), "none is marked beside an unknown one"
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        asked = await ask("nodes", "drain", "r0n0", "r0n1")
        assert "Draining r0n0, r0n1 moves 1 job (hello-1); add --yes" in asked.err and asked.status == 2
        assert await states() == ["healthy", "healthy"]
        drained = (await ask("nodes", "drain", "r0n0", "r0n1", "--yes", "--json")).document
        assert (drained["kind"], [one["node"] for one in drained["items"]]) == ("DrainPlanList", ["r0n0", "r0n1"])
        assert (await states())[1] == "drained" and (await states())[0] in ("draining", "drained")
        assert (await ask("nodes", "undrain", "r0n0", "r0n1")).out.splitlines()[0] == "r0n0 is healthy"
        assert await states() == ["healthy", "healthy"]

    with_cli(tmp_path / "service", test)


def test_yaml_says_what_json_says(tmp_path: Path) -> None:
    def read(text: str) -> Any:
        return YAML(typ="safe", pure=True).load(text)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit("labels: {a: '1', b: 'true', c: 'x: y'}\n" + HELLO)
        for words in (["show", "hello-1", "--spec"], ["show", "nobody"]):
            in_json, in_yaml = await ask(*words, "--json"), await ask(*words, "-o", "yaml")
            one, other = in_json.document, read(in_yaml.out)
            for document in (one, other):
                document.get("fields", {}).pop("request_id", None)
            assert (in_yaml.status, other) == (in_json.status, one)
        lines = (await ask("events", "hello-1", "-o", "yaml")).out
        assert "---" in lines or read(lines)["kind"] == "EventList"

    with_cli(tmp_path / "service", test)
    mistake = rota("ps", "--al", "--output=yaml")
    assert (mistake.status, read(mistake.out)["kind"]) == (2, "Error")
    assert json.loads(rota("ps", "--al", "--output=json").out)["kind"] == "Error"


def test_set_with_a_version_does_not_undo_the_change_of_another(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        seen = str((await service.submit())["version"])
        assert (await ask("set", "hello-1", "priority=60", "--if-version", seen)).status == 0
        late = await ask("set", "hello-1", "priority=70", "--if-version", seen, "--json")
        assert (late.status, late.document["code"]) == (2, "VERSION_MISMATCH")
        assert (await service.get("/jobs/hello-1"))["priority"] == 60

    with_cli(tmp_path / "service", test)


def test_an_attempt_and_the_edits_of_a_job_are_shown_alone(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        await service.play_start("hello-1", "main/0")
        assert (await ask("show", "hello-1", "--diff")).out == "hello-1: no edits\n"
        await ask("set", "hello-1", "priority=80")
        edits = (await ask("show", "hello-1", "--diff")).out
        assert "edit by local" in edits and "+priority: 80" in edits
        one = (await ask("show", "hello-1", "--attempt", "1", "--json")).document
        assert (one["attempt"], one["nodes"], one["reason"], one["failures"]) == (1, ["r0n0"], None, [])
        assert "r0n0" in (await ask("show", "hello-1", "--attempt", "1")).out
        wrong = await ask("show", "hello-1", "--attempt", "2")
        assert (wrong.status, "has no attempt 2" in wrong.err) == (2, True)
        assert (await ask("show", "hello-1", "--attempt", "1", "--diff")).status == 2

    with_cli(tmp_path, test)


def test_scale_waits_until_the_instances_are_ready_or_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SCALE_LOOK_S", 0.0)
    seen = [("RESIZING", 4, 2), ("RUNNING", 4, 3), ("RUNNING", 4, 4), ("RUNNING", 4, 4)]

    class Answers:
        def job(self, _: str) -> dict[str, Any]:
            state, wanted, ready = seen.pop(0) if len(seen) > 1 else seen[0]
            return {"state": state, "roles": [{"name": "train", "replicas": wanted, "ready": ready}]}

    client: Any = Answers()
    assert jobs._scaled(client, "j-1", "train", 4, None)["roles"][0]["ready"] == 4
    assert len(seen) == 1, "it looked three times"
    with pytest.raises(TimedOut, match="train: 4 of 5 ready"):
        jobs._scaled(client, "j-1", "train", 5, 0.0)
    seen[:] = [("FAILED", 4, 0)]
    with pytest.raises(Conflict, match="j-1 is FAILED"):
        jobs._scaled(client, "j-1", "train", 4, None)


def test_many_are_stopped_only_with_a_yes(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        for name in ("one", "two"):
            await ask("run", "-n", name, "--set", "labels.sweep=7", "--", "sleep", "9")
        asked = await ask("stop", "-l", "sweep=7")
        assert (asked.status, "stop 2 jobs (" in asked.err and "); add --yes" in asked.err) == (2, True)
        assert (await ask("stop", "one-1", "--json")).document["items"][0]["done"] is True
        done = await ask("stop", "-l", "sweep=7", "--yes", "--json")
        assert {item["job"] for item in done.document["items"]} >= {"two-1"}
        assert (await ask("stop", "none-1", "two-1")).status == 2
        nobody = await ask("stop", "-l", "sweep=8", "--yes")
        assert (nobody.status, "no live job has sweep=8" in nobody.err) == (2, True)

    with_cli(tmp_path / "service", test)


def test_a_removed_user_has_the_jobs_named_that_run_on_and_local_is_not_removed(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await ask("user", "create", "ann", "--role", "user")
        token = (await ask("token", "create", "--user", "ann", "--json")).document["token"]
        head = {"authorization": f"Bearer {token}"}
        body = {"source": "name: hers\nroles: {m: {run: [sleep, inf]}}\n"}
        assert (await service.http.post("/api/v1/jobs", json=body, headers=head)).status_code == 201
        gone = await ask("user", "rm", "ann")
        assert gone.status == 0
        assert "ann has 1 job that has not ended (hers-1): they run on; to end them: rota stop JOB" in gone.err
        refused = await ask("user", "rm", "local")
        assert refused.status == 2 and "user 'local' cannot be removed: it is who owns the home" in refused.err

    with_cli(tmp_path / "service", test)


def test_queues_show_the_cores_in_use(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit("name: cores\nroles: {m: {run: [sleep, inf], replicas: 2, resources: {cpus: 1.5}}}\n")
        await service.until("cores-1", JobState.ADMITTED)
        [row] = (await service.get("/queues"))["items"]
        assert (row["used_gpus"], row["used_cpus"]) == (0, 3)
        assert "default open 0 3 " in re.sub(" +", " ", (await ask("queues")).out)

    with_cli(tmp_path / "service", test)


def test_a_timer_of_a_job_is_named_by_what_it_means() -> None:
    fired: Any = {"kind": "TimerFired", "at": "2023-11-14T22:24:30Z", "timer": "drain/r0n0/1795770074.835"}
    assert event_text(fired).endswith("TimerFired timer=drain (the notice of the drained node is over)")
    texts = "".join(one.read_text() for one in Path(core.__file__).parent.glob("*.py"))
    kinds = re.findall(r'timer ?= ?f"([a-z-]+)', texts)
    assert len(kinds) == 10
    assert all(f"timer={kind} (" in event_text(fired | {"timer": f"{kind}/1"}) for kind in kinds)


def test_a_variable_of_the_command_line_holds_in_every_role(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HELLO.replace("  main:", "  main:\n    env: {A: file, B: file, C: file}"))

    async def test(_: Standing, ask: Callable[..., Any]) -> None:
        words = ("-d", "-e", "A=[shell]", "-e", "B=shell", "-e", "D=", "--set", "roles.main.env.B=set")
        assert (await ask("run", "job.yaml", *words)).status == 0
        spec = (await ask("show", "hello-1", "--spec", "--json")).document["spec"]
        assert spec["roles"][0]["env"] == [["A", "[shell]"], ["B", "set"], ["C", "file"]]
        assert ["D", ""] in spec["env"]

    with_cli(tmp_path / "service", test)
