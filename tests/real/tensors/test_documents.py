"""What people and programs are shown: rows, holders, findings, gc, events in order."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import Crew, wait_until

from rota.tensors import errors
from rota.tensors.api.channels import TensorEvent, WatchGap
from rota.tensors.api.store import Plane


def test_ls_and_stat_show_shape_age_and_the_process_that_holds_an_old_version(plane: Plane, actors: Crew) -> None:
    plane.put("w/a", np.zeros((2, 3), np.float32), label="job/actor/0", epoch=4, step=9)
    plane.publish_group("w/g", {"x": np.zeros(3), "y": np.zeros(3)}, step=1)
    reader = actors.start("v = plane.get('w/a', as_='numpy'); print('holding', flush=True); os.read(os.pipe()[0], 1)")
    actors.says(reader, "holding")
    plane.put("w/a", np.zeros((2, 3), np.float32), epoch=4)
    items = plane.list_document("w/")["items"]
    assert [(item["name"], item["kind"], item["tensors"]) for item in items] == [
        ("w/a", "tensor", 1),
        ("w/g", "group", 2),
    ]
    assert (items[0]["dtype"], items[0]["shape"], items[0]["step"], items[0]["epoch"]) == ("f32", [2, 3], 10, 4)
    stat = plane.stat_document("w/a")
    assert [version["state"] for version in stat["versions"]] == ["doomed", "ready"]
    assert [holder["pid"] for holder in stat["versions"][0]["holders"]] == [reader]
    assert plane.top()["items"][0]["doomed_bytes"] >= 0
    json.dumps([items, stat, plane.top(), plane.stats(), plane.doctor(), plane.fsck()])
    with pytest.raises(errors.NotFound):
        plane.stat_document("none")


def test_locate_and_stat_of_a_name_look_at_that_name_alone(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(20):
        plane.put(f"other/{n}", np.zeros(8))
    plane.publish_group("g", {"a": np.zeros(8)}, step=1, part=(0, 2))
    plane.publish_group("g", {"b": np.ones(8)}, step=1, part=(1, 2))
    plane.put("w", np.zeros(8))
    old = plane.get("w", as_="numpy")
    plane.put("w", np.ones(8))
    asked = list[str]()
    real = plane._session.machine.run

    def run(name: str, *args: Any) -> Any:
        asked.append(name)
        return real(name, *args)

    monkeypatch.setattr(plane._session.machine, "run", run)
    assert [(each.part, each.tier) for each in plane.locate("g")] == [(0, "memory"), (1, "memory")]
    shown = plane.stat_document("w")["versions"]
    assert "dump" not in asked
    assert {each["state"]: (each["leases"], len(each["holders"])) for each in shown} == {
        "doomed": (1, 1),
        "ready": (0, 0),
    }
    with pytest.raises(errors.NotFound):
        plane.locate("none")
    del old


def test_fsck_finds_and_repair_mends_a_wrong_count_and_a_lost_block(plane: Plane) -> None:
    plane.put("w", np.zeros(3))
    view = plane.get("w", as_="numpy")
    row, client = plane.info("w"), plane._session.machine.client
    client.call("HSET", f"{plane._session.machine.prefix}v:{row.version}", "refs", 5)
    seg = next(iter(plane._space.registry.members("segs")))
    client.call("HINCRBY", f"{plane._session.machine.prefix}s:{seg}", "next", 1)
    (plane._space.folder / "seg-64-999").write_bytes(b"x" * 4096)
    assert {each["rule"] for each in plane.fsck()["violations"]} == {"I1", "I2", "I5"}
    (plane._space.folder / "seg-64-999").unlink()
    assert all(each["repaired"] for each in plane.fsck(repair=True)["violations"])
    assert plane.fsck()["violations"] == []
    assert plane.get("w", as_="numpy").tolist() == [0, 0, 0]
    del view
    wait_until(lambda: plane.stats()["leases"] <= 1)


def test_the_doctor_finds_this_machine_fit_and_says_what_it_looked_at(plane: Plane) -> None:
    checks = {each["name"]: each for each in plane.doctor()["checks"]}
    assert checks["registry access"]["level"] == "ok"
    assert checks["registry server"]["value"].startswith(("valkey", "redis"))
    assert "shared memory" in checks
    assert all(each["remedy"] for each in checks.values() if each["level"] != "ok")


def test_a_watch_tells_every_publish_in_order_and_resumes(plane: Plane) -> None:
    seen: list[TensorEvent] = []
    done = threading.Event()

    def note(event: TensorEvent) -> None:
        seen.append(event)
        if event.kind == "deleted":
            done.set()

    with plane.watch("a/", note):
        for step in range(3):
            plane.put("a/x", np.zeros(2), step=step)
            plane.put("b/x", np.zeros(2), step=step)
        plane.delete("a/x")
        assert done.wait(60)
    published = [(event.name, event.step) for event in seen if event.kind == "published"]
    assert published == [("a/x", 0), ("a/x", 1), ("a/x", 2)]
    with plane.watch("a/", after=seen[0].id) as again:
        later = next(event for event in again if event.kind == "published")
    assert later.step == 1


def test_a_watch_over_a_rebuilt_registry_says_that_it_missed_events(plane: Plane) -> None:
    with plane.watch() as watch:
        plane.recover()
        with pytest.raises(WatchGap, match="rebuilt"):
            next(iter(watch))


def test_the_last_of_a_dead_reader_is_shown_by_gc(plane: Plane, actors: Crew) -> None:
    plane._session._gone.set()
    plane._session._thread.join()
    code = "v = plane.get('w', wait_s=5, as_='numpy'); print('holding', flush=True); os.read(os.pipe()[0], 1)"
    reader = actors.start(code)
    plane.put("w", np.zeros(3))
    actors.says(reader, "holding")
    actors.kill(reader)
    tried = plane.gc(dry_run=True)
    assert (tried["dry_run"], tried["swept"]) == (True, 1)
    done = plane.gc()
    assert done["swept"] == 1
    assert done["dropped"][0]["why"] == "its process is dead"
    plane._session._gone.clear()
