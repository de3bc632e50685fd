"""A back-up restores into another home, on either kind of store; a damaged one is refused and leaves an empty store."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standing import HELLO, Standing, standing, with_service
from test_cli import rota, with_cli
from tests import postgres

from rota.runtime.environ import Home
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.process import write_private
from rota.runtime.secrets import Vault
from rota.service.config import Settings, load_settings
from rota.service.process.backup import back_up, restore
from rota.service.process.daemon import as_before
from rota.service.process.serve import only_one
from rota.spec.errors import BadInput, Conflict, StoreCorrupt
from rota.spec.events import JobEnded
from rota.spec.reasons import Reason
from rota.spec.states import JobState

_NO_SERVER = pytest.mark.skipif(bool(postgres.why_not()), reason=postgres.why_not())
STORES = ["sqlite", pytest.param("postgres", marks=[pytest.mark.slow, _NO_SERVER])]


def made(tmp_path: Path, *, paused: bool = False) -> tuple[Settings, Path]:
    """An installation with a user, a secret, a job that was admitted and one that is ``paused``; and its back-up."""

    async def live() -> None:
        async with standing(tmp_path / "old") as service:
            await fill(service)

    async def fill(service: Standing) -> None:
        await service.http.put("/api/v1/users/ann", json={"grants": [{"queue": "default", "role": "user"}]})
        await service.http.put("/api/v1/secrets/KEY", json={"value": "a-secret-value"})
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        if paused:
            await service.submit(HELLO + "after: [hello-1]\n")
            await service.until("hello-2", JobState.QUEUED)
            await service.http.post("/api/v1/jobs/hello-2:pause")
            await service.until("hello-2", JobState.PAUSED)
        (service.app.home.job("hello-1").logs / "main-0.log").write_text("said\n")
        service.app.home.webhooks.mkdir()
        (service.app.home.webhooks / "w1").write_text("3")

    asyncio.run(live())
    db_url = postgres.database(tmp_path / "old") if postgres.WANTED else ""
    old = load_settings({"home": str(tmp_path / "old"), "db_url": db_url}, environ={})
    out = tmp_path / "b.tar.gz"
    back_up(old, out)
    return old, out


@pytest.mark.parametrize("store", STORES)
def test_a_back_up_restores_jobs_users_secrets_and_logs(tmp_path: Path, store: str) -> None:
    old, out = made(tmp_path)
    assert oct(out.stat().st_mode & 0o777) == "0o600"
    home = tmp_path / "new"
    db_url = "" if store == "sqlite" else postgres.database(home)
    new = load_settings({"home": str(home), "db_url": db_url}, environ={})
    done = restore(new, out)
    assert done["jobs"] == 1
    before, after = SqlLog(old.db_url or f"sqlite:///{old.home}/rota.db"), SqlLog(db_url or f"sqlite:///{home}/rota.db")
    assert after.read() == before.read() and after.last_number() == done["records"] > 4
    assert after.fence("install") == before.fence("install") == 1
    before.close()
    after.close()
    assert Vault(home=_home(home)).open("local", ["KEY"]) == {"KEY": "a-secret-value"}
    assert (home / "token").read_text() == (tmp_path / "old" / "token").read_text()
    assert (home / "jobs" / "hello-1" / "logs" / "main-0.log").read_text() == "said\n"
    assert (home / "run" / "webhooks" / "w1").read_text() == "3"
    assert oct((home / "secret.key").stat().st_mode & 0o777) == "0o600"
    assert {oct(one.stat().st_mode & 0o777) for one in (home / "secrets").rglob("")} == {"0o700"}
    with pytest.raises(Conflict, match="is not empty"):
        restore(new, out)


def test_a_restore_says_which_pretend_nodes_and_how_many_jobs_the_next_up_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, out = made(tmp_path, paused=True)
    write_private(Home.of(old.home).last_up, json.dumps({"pretend": "2x4x8", "port": 7711}))
    out.unlink()
    back_up(old, out)
    new = load_settings({"home": str(tmp_path / "new")}, environ={})
    monkeypatch.setenv("ROTA_HOME", new.home)
    said = rota("restore", str(out))
    assert "start it: rota up (with the pretend nodes 2x4x8)" in said.out, said
    assert "The next 'rota up' here continues 1 job of the back-up." in said.err
    assert "end it first (rota down), or they run twice" in said.err
    again = as_before(new, Home.of(new.home))
    assert (again.pretend, again.port) == ("2x4x8", new.port), "the address is that of the new home"


def test_a_restored_installation_and_its_jobs_say_so_until_they_have_ended(tmp_path: Path) -> None:
    _, out = made(tmp_path)
    restore(load_settings({"home": str(tmp_path / "new")}, environ={}), out)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit()
        shown = [(await ask("show", job)).out for job in ("hello-1", "hello-2")]
        assert ["from a back-up" in text for text in shown] == [True, False]
        assert (await service.get("/jobs/hello-1"))["restored_at"] and not (await service.get("/jobs/hello-2"))[
            "restored_at"
        ]
        status = await ask("status")
        assert "warning: 1 job of b.tar.gz, restored " in status.err and "or they run twice" in status.err
        await service.play_start("hello-1", "main/0")
        await service.seen(service.as_master("hello-1", JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED)))
        assert "restored" not in (await ask("status")).err and "from a back-up" in (await ask("show", "hello-1")).out

    with_cli(tmp_path / "new", test)


@pytest.mark.parametrize("text", ["{", "[]", '{"at": "x", "file": "b"}', "\0\xff"])
def test_a_damaged_note_of_a_restore_keeps_no_service_down(tmp_path: Path, text: str) -> None:
    async def test(service: Standing) -> None:
        assert (await service.submit())["restored_at"] is None

    (tmp_path / "restored.json").write_text(text)
    with_service(tmp_path, test)


def _home(root: Path):
    from rota.runtime.environ import Home

    return Home.of(root)


@pytest.mark.parametrize("target", ["absent", "empty", "with settings"])
def test_a_damaged_back_up_is_refused_and_leaves_nothing(tmp_path: Path, target: str) -> None:
    _, out = made(tmp_path)
    home, bad = tmp_path / "new", tmp_path / "bad.tar.gz"
    for damage in ("crc", "gap", "cut", "outside", "other"):
        if damage == "cut":
            bad.write_bytes(out.read_bytes()[:-200])
        elif damage == "other":
            bad.write_text("hello")
        else:
            _rewrite(out, bad, damage)
        if target != "absent":
            home.mkdir(exist_ok=True)
        if target == "with settings":
            (home / "config.toml").write_text("port = 7800")
        with pytest.raises((BadInput, StoreCorrupt)):
            restore(load_settings({"home": str(home)}, environ={}), bad)
        left = {path.name for path in home.rglob("*") if path.is_file()} if home.exists() else set()
        assert left == ({"config.toml"} if target == "with settings" else set()), damage
        assert home.exists() == (target != "absent") and not (tmp_path / "escaped").exists()
    assert restore(load_settings({"home": str(home)}, environ={}), out)["records"] > 4


def test_a_restore_that_was_killed_keeps_the_service_away_until_it_is_done_again(tmp_path: Path) -> None:
    _, out = made(tmp_path)
    new, home = load_settings({"home": str(tmp_path / "new")}, environ={}), _home(tmp_path / "new")
    for points in ("load", "close"):  # before the store is filled, and after
        child = os.fork()
        if child == 0:
            setattr(SqlLog, points, lambda *given, **named: os._exit(9))
            restore(new, out)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        with pytest.raises(Conflict, match="did not end"), only_one(home):
            pass
    assert restore(new, out)["files"] >= 5
    with only_one(home):
        assert (home.root / "token").read_text() == (tmp_path / "old" / "token").read_text()


def test_a_back_up_that_cannot_be_written_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    old, out = made(tmp_path)
    with pytest.raises(BadInput, match="cannot be written"):
        back_up(old, tmp_path / "absent" / "b.tar.gz")
    named = [path.name for path in tmp_path.iterdir()]
    assert out.name in named and not [name for name in named if "partial" in name]


def _rewrite(source: Path, target: Path, damage: str) -> None:
    with tarfile.open(source) as old, tarfile.open(target, "w:gz") as new:
        for member in old.getmembers():
            raw = old.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "events.jsonl":
                rows = [json.loads(line) for line in raw.splitlines()]
                if damage == "crc":
                    rows[2]["body"] = rows[2]["body"].replace("local", "mallory")
                    rows[2]["at"] += 1
                elif damage == "gap":
                    del rows[2]
                raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
            if damage == "outside" and member.name == "home/token":
                member.name = "home/../../escaped"
            member.size = len(raw)
            new.addfile(member, io.BytesIO(raw))


@pytest.mark.skipif(postgres.WANTED, reason="the file is one of SQLite")
def test_a_database_of_the_first_release_is_taken_over_whole(tmp_path: Path) -> None:
    sql = (Path(__file__).resolve().parents[1] / "data" / "service" / "first_release.sql").read_text(encoding="utf-8")
    with sqlite3.connect(tmp_path / "rota.db") as database:
        database.executescript(sql)
    database.close()

    async def test() -> None:
        async with standing(tmp_path) as service:
            rows = {row["id"]: row for row in (await service.get("/jobs", all=True))["items"]}
            states = {job: (row["state"], row["priority"], row["queue"]) for job, row in rows.items()}
            assert states == {
                "hello-1": ("SUCCEEDED", 50, "default"),
                "grpo-1": ("ADMITTED", 50, "research/rl"),
                "waits-1": ("QUEUED", 70, "research/rl"),
            }
            assert rows["waits-1"]["labels"] == {"team": "a"}
            nodes = {row["id"]: row["state"] for row in (await service.get("/nodes"))["items"]}
            assert nodes == {"r0n0": "healthy", "r0n1": "drained"}
            again = await service.submit(key="k1")
            assert again["id"] == "hello-1"
            grants = {"grants": [{"queue": "research", "role": "user"}]}
            assert (await service.http.put("/api/v1/users/ann", json=grants)).status_code == 200
            assert (await service.submit())["id"] == "hello-2"

    asyncio.run(test())
