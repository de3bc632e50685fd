"""Logs and outputs of instances on a machine that does not see the home of the service."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.service.standing import Standing, listening, stream, with_service

from rota.runtime.environ import Home
from rota.runtime.job_files import FILES_LABEL, OWN_FILES, FileEntries
from rota.service.aclient import AsyncClient
from rota.service.control import job_files
from rota.service.copy import chosen, incoming, targets
from rota.service.models.jobs import FileRow
from rota.spec.errors import BadInput, Conflict, UnknownName
from rota.spec.events import JobEnded, NodeJoined
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState

TWO = """
name: wide
roles:
  main:
    run: [sleep, "600"]
    replicas: 2
    resources: {gpus: 1}
    apart: [{role: self, level: node}]
"""


async def started(service: Standing, tmp_path: Path) -> tuple[str, str, Home, Home]:
    """A job whose main/1 runs on a machine with files of its own: job, that machine, its home, the service's."""
    nodes = [status.node for status in service.app.loop.installation.nodes.values()]
    own = nodes[1]
    await service.app.loop.append([NodeJoined(node=replace(own, labels=(*own.labels, (FILES_LABEL, OWN_FILES))))])
    service.engine.homes[own.id] = tmp_path / "there"
    job = (await service.submit(TWO, workdir=str(tmp_path / "code")))["id"]
    await service.play_start(job, "main/0", "main/1")
    where = {one["instance"]: one["node"] for one in (await service.get(f"/jobs/{job}/placement"))["items"]}
    assert own.id in where.values()
    there, here = Home.of(tmp_path / "there"), service.app.home
    if where["main/1"] != own.id:  # the placement is the scheduler's: name the instances by where they are
        pytest.skip("the scheduler placed them the other way round")
    there.job(job).make()
    return job, own.id, there, here


def line(home: Home, job: str, name: str, n: int, text: str) -> None:
    stamp = f"2026-01-01T00:00:{n:02}.000Z 1/1 out"
    with (home.job(job).logs / name).open("a") as file:
        file.write(f"{stamp} {text}\n")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)")
    return tmp_path / "code"


def test_logs_are_read_and_followed_wherever_they_lie(tmp_path: Path, code: Path) -> None:
    async def check(service: Standing) -> None:
        job, node, there, here = await started(service, tmp_path)
        for n in range(6):
            line(there if n % 2 else here, job, f"main-{n % 2}.log", n, f"line {n}")
        line(there, job, "main-0.log", 7, "of an attempt before")
        page = await service.get(f"/jobs/{job}/logs")
        assert [(one["text"], one["node"]) for one in page["items"]] == [
            *((f"line {n}", node if n % 2 else "") for n in range(6)),
            ("of an attempt before", node),
        ]
        assert page["notices"] == []
        tail = await service.get(f"/jobs/{job}/logs", tail=2)
        assert [one["text"] for one in tail["items"]] == ["line 5", "of an attempt before"]
        since = await service.get(f"/jobs/{job}/logs", since=1767225604.0, instance="main/1")
        assert [one["text"] for one in since["items"]] == ["line 5"]
        line(there, job, "main-1.log", 8, "later")
        rest = await service.get(f"/jobs/{job}/logs", cursor=page["next"])
        assert [one["text"] for one in rest["items"]] == ["later"]
        async with listening(service) as http, aclosing(stream(http, f"/jobs/{job}/logs", follow=True)) as events:
            seen = [(await anext(events))["data"]["text"] for _ in range(8)]
            assert seen[-1] == "later"
            for n in range(200):
                line(there, job, "main-1.log", 9, f"more {n}")
            more = [await anext(events) for _ in range(100)]
        last = next(one["id"] for one in reversed(more) if "id" in one)
        async with listening(service) as http:
            again = aclosing(stream(http, f"/jobs/{job}/logs", follow=True, last_id=last))
            async with again as events:
                seen = [(await anext(events))["data"]["text"] for _ in range(100)]
        at = int(next(one for one in reversed(more) if "id" in one)["data"]["text"].split()[1])
        assert seen == [f"more {n}" for n in range(at + 1, at + 101)]

    with_service(tmp_path / "home", check)


def test_a_machine_that_does_not_answer_is_named_with_what_was_known_of_its_lines(tmp_path: Path, code: Path) -> None:
    async def check(service: Standing) -> None:
        job, node, there, here = await started(service, tmp_path)
        line(here, job, "main-0.log", 1, "here")
        line(there, job, "main-1.log", 2, "there")
        size = (there.job(job).logs / "main-1.log").stat().st_size
        await service.get(f"/jobs/{job}/logs")
        del service.engine.homes[node]
        page = await service.get(f"/jobs/{job}/logs")
        assert [one["text"] for one in page["items"]] == ["here"]
        (notice,) = page["notices"]
        assert notice.startswith(f"{node} does not answer: it is not a machine of the engine now")
        assert f"main/1 ({size} bytes at " in notice and f"of which {size} were read) is on {node}" in notice
        async with listening(service) as http:
            client = AsyncClient(str(http.base_url), http.headers["Authorization"].split()[1])
            seen, said = list[str](), list[str]()

            async def follow() -> None:
                async for one in client.logs(job, follow=True, notice=said.append):
                    seen.append(one["text"])

            following = asyncio.create_task(follow())
            async with asyncio.timeout(20):
                while not said:
                    await asyncio.sleep(0.05)
                number = service.as_master(job, JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED))
                await service.seen(number)
                await following
            assert (seen, len(said)) == (["here"], 1)
            said.clear()
            assert [one["text"] async for one in client.logs(job, notice=said.append)] == ["here"]
            assert len(said) == 1

    with_service(tmp_path / "home", check)


def test_outputs_are_copied_from_the_machine_that_has_them(tmp_path: Path, code: Path) -> None:
    async def check(service: Standing) -> None:
        job, node, there, here = await started(service, tmp_path)
        big = bytes(range(256)) * 20_000
        (there.job(job).output / "ckpt" / "deep").mkdir(parents=True)
        (there.job(job).output / "ckpt" / "deep" / "w.bin").write_bytes(big)
        (there.job(job).output / "ckpt" / "link").symlink_to("/etc/passwd")
        (here.job(job).output / "ckpt").mkdir()
        (here.job(job).output / "ckpt" / "a.txt").write_text("a")
        for home in (here, there):
            (home.job(job).output / "same.txt").write_text(str(home.root))
        target = tmp_path / "target"
        target.mkdir()
        async with listening(service) as http:
            client = AsyncClient(str(http.base_url), http.headers["Authorization"].split()[1])
            done = await client.copy(job, "ckpt", target)
            assert (done.left_out, done.notices, len(done.files)) == (("ckpt/link",), (), 2)
            assert (target / "ckpt/deep/w.bin").read_bytes() == big
            assert (target / "ckpt/a.txt").read_text() == "a"
            await client.copy(job, "ckpt/deep/w.bin", target / "renamed.bin")
            assert (target / "renamed.bin").read_bytes() == big
            with pytest.raises(Conflict, match=f"same.txt .on the machine of the service, {node}."):
                await client.copy(job, "same.txt", target)
            await client.copy(job, "same.txt", target, node=node)
            assert (target / "same.txt").read_text() == str(there.root)
            with pytest.raises(BadInput, match="must lie below"):
                await client.files(job, "../../..")
            with pytest.raises(BadInput, match="link or a socket"):
                await client.files(job, "ckpt/link/x", node=node)
            with pytest.raises(UnknownName, match="no file or folder nothing"):
                await client.copy(job, "nothing", target)
            with pytest.raises(UnknownName, match="no instance on 'elsewhere'"):
                await client.files(job, node="elsewhere")
            del service.engine.homes[node]
            listed = await client.files(job)
            assert [row["path"] for row in listed["items"]] == ["ckpt", "ckpt/a.txt", "same.txt"]
            assert f"{node} does not answer" in listed["notices"][0]
        assert sorted(path.name for path in target.iterdir()) == ["ckpt", "renamed.bin", "same.txt"]

    with_service(tmp_path / "home", check)


def test_a_silent_machine_holds_up_few_requests_and_each_of_them_once(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_files, "ANSWER_S", 0.3)
    asked = list[str]()

    async def silence(host: str, *_: object) -> FileEntries:
        asked.append(host)
        await asyncio.Event().wait()
        raise AssertionError

    async def check(service: Standing) -> None:
        job, node, _, here = await started(service, tmp_path)
        line(here, job, "main-0.log", 1, "here")
        monkeypatch.setattr(service.engine, "list_files", silence)
        pages = await asyncio.gather(*(service.get(f"/jobs/{job}/logs") for _ in range(5 * job_files.THREADS_MAX)))
        for page in pages:
            assert [one["text"] for one in page["items"]] == ["here"]
            assert page["notices"][0].startswith(f"{node} does not answer: nothing in 0.3 s")
        assert 1 <= len(asked) <= job_files.THREADS_MAX
        before = len(asked)
        await service.get(f"/jobs/{job}/logs")
        assert len(asked) == before, "a machine that was silent a moment ago is left alone by every request"

    with_service(tmp_path / "home", check)


def row(path: str, node: str = "", mark: str = "1") -> FileRow:
    return {"path": path, "node": node, "kind": "file", "bytes": 1, "mark": mark}


def test_a_service_that_lies_writes_nothing_outside_the_target(tmp_path: Path) -> None:
    for bad in ("../x", "/etc/x", "a/../../x", "b/x"):
        with pytest.raises(BadInput):
            targets([row(bad)], "a", tmp_path)
    assert targets([row("a"), row("a/x")], "a", tmp_path / "new")[1][1] == tmp_path / "new" / "x"
    assert chosen([row("x", "m0"), row("x", "m1")]) == [row("x", "m0")]
    with pytest.raises(Conflict, match=r"x \(on m0, m1\)"):
        chosen([row("x", "m0"), row("x", "m1", "2")])


def test_code_is_packed_at_submit_only_for_machines_that_need_it(tmp_path: Path, code: Path) -> None:
    async def check(service: Standing) -> None:
        alone = (await service.submit(TWO, workdir=str(code)))["id"]
        home = service.app.home
        assert not home.job(alone).code_name.exists() and not home.code_archives.exists()
        await service.http.post(f"/api/v1/jobs/{alone}:stop", json={"grace_s": 0})
        job, *_ = await started(service, tmp_path)
        digest = home.job(job).code_name.read_text()
        assert [path.name for path in home.code_archives.iterdir()] == [f"{digest}.tar"]
        key = {"Idempotency-Key": "k"}
        body = {"source": TWO, "workdir": str(code)}
        first = (await service.http.post("/api/v1/jobs", json=body, headers=key)).json()
        with (code / "big").open("wb") as file:
            file.truncate(300 * 2**20)
        before = len((await service.get("/jobs"))["items"])
        answer = await service.http.post("/api/v1/jobs", json={"source": TWO, "workdir": str(code)})
        assert answer.status_code == 422
        assert "largest: big 300.0 MiB, train.py 0.0 MiB" in answer.json()["detail"]
        assert len((await service.get("/jobs"))["items"]) == before
        again = await service.http.post("/api/v1/jobs", json=body, headers=key)
        assert (again.status_code, again.json()["id"]) == (200, first["id"]), "it is packed once"

    with_service(tmp_path / "home", check)


def test_the_job_id_of_a_path_cannot_leave_the_home(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a job id"):
        Home.of(tmp_path).job(JobId("../x"))


def test_a_link_below_the_target_is_refused_before_a_folder_is_made_behind_it(tmp_path: Path) -> None:
    root, outside = tmp_path / "target", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(BadInput, match="a link that leaves"), incoming(root / "link" / "deep" / "file", root, 0):
        pass
    assert list(outside.iterdir()) == []
