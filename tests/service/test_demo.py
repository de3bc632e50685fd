"""What rota demo accepts as healed and as success, and the page it writes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from test_cli import rota

from rota.runtime import file_locks, process
from rota.runtime.environ import Home
from rota.service import demo
from rota.service.config import load_settings
from rota.service.demo import KILL_STEPS, Kill, Outcome, judge
from rota.service.process import daemon
from rota.spec.errors import EngineUnavailable, TimedOut


def kill(victim: str, **fields: Any) -> Kill:
    return Kill(**{"victim": victim, "pid": 7, "at": 140, "wall_s": 1.0, "new_pid": 8, "healed_s": 2.0, **fields})


def commits(last: int, *, reward_to: float = 0.7) -> list[dict[str, Any]]:
    rise = (reward_to - 0.4) / last
    return [
        {"kind": "Committed", "n": n, "at": f"2026-01-01T00:{n // 60:02}:{n % 60:02}Z", "metrics": metrics(n, rise)}
        for n in range(1, last + 1)
    ]


def metrics(n: int, rise: float) -> dict[str, float]:
    return {"reward": 0.4 + rise * n}


def outcome(**fields: Any) -> Outcome:
    events = fields.pop("events", commits(200))
    return Outcome(
        **{
            "job": "grpo-sums-1",
            "state": "SUCCEEDED",
            "seconds": 100.0,
            "commits": [one["n"] for one in events],
            "figures": demo._figures(events),
            "kills": [kill(step.victim) for step in KILL_STEPS],
            "waiting": [{"job": "pretrain-1", "asks": "12 x 8 devices", "why": "NO_FREE_DEVICES: <88> free"}],
            "failures": [],
            "events": events,
            "problems": [],
            **fields,
        }
    )


def test_three_healed_kills_commits_once_each_and_a_risen_reward_are_success() -> None:
    assert judge(outcome()) == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"state": "FAILED"}, "ended as FAILED"),
        ({"kills": [kill("rollout/1"), kill("actor/1")]}, "2 of 3 kills"),
        ({"kills": [kill("rollout/1"), kill("actor/1"), kill("master", healed_s=None)]}, "master did not come back"),
        ({"commits": [1, 2, 2, 3]}, "not 1..N"),
        ({"commits": [1, 3]}, "not 1..N"),
        ({"commits": []}, "not 1..N"),
        ({"events": commits(200, reward_to=0.6)}, "reward rose by 0.1"),
        ({"events": commits(12)}, "reward rose by 0.000"),
    ],
)
def test_each_broken_promise_is_named(fields: dict[str, Any], problem: str) -> None:
    found = judge(outcome(**fields))
    assert len(found) == 1 and problem in found[0]


def document(commit: int, pid: int, *, state: str = "READY", master: int = 5) -> dict[str, Any]:
    instances = [{"instance": "rollout/1", "pid": pid, "state": state}]
    return {"progress": {"commit": commit}, "instances": instances, "master": {"pid": master}}


def test_a_kill_counts_as_healed_only_with_a_new_ready_process_and_further_commits() -> None:
    done = kill("rollout/1", pid=7, at=140)
    assert demo._healed(document(142, 8), done)
    assert not demo._healed(document(142, 7), done), "the log does not know of the death yet"
    assert not demo._healed(document(141, 8), done), "no progress yet"
    assert not demo._healed(document(142, 8, state="STALE"), done)
    assert demo._healed(document(142, 7, master=6), kill("master", pid=5, at=140))
    assert not demo._healed(document(142, 7, master=5), kill("master", pid=5, at=140))


def test_the_report_holds_the_curve_every_kill_and_every_reason_and_needs_no_other_file(tmp_path: Path) -> None:
    output = tmp_path / "job"
    output.mkdir()
    (output / "curve.png").write_bytes(b"picture")
    page = demo.write_report(tmp_path / "report", outcome(), output).read_text(encoding="utf-8")
    assert base64.b64encode(b"picture").decode() in page
    assert all(step.victim in page for step in KILL_STEPS) and "<polyline" in page
    assert "&lt;88&gt; free" in page, "texts of the log are no markup"
    facts = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert [one["victim"] for one in facts["kills"]] == [step.victim for step in KILL_STEPS]


class Starting:
    """Answers as a client whose job does not come up."""

    def job(self, job: str) -> dict[str, Any]:
        phase = "1 of 8 instances ready, waits for actor/0"
        return {"state": "RECOVERING", "phase": phase, "progress": None, "error": None}


def test_a_play_without_time_left_says_what_the_job_waits_for_and_how_busy_the_machine_is() -> None:
    told: list[str] = []
    client: Any = Starting()
    watch = demo._Watch(client, "grpo-sums-1", told.append, began_s=-1e9)
    with pytest.raises(TimedOut, match="did not reach commit 140: commit 0: RECOVERING, 1 of 8") as caught:
        watch.kill(KILL_STEPS[0])
    assert "the load is" in (caught.value.hint or "")
    assert told == ["commit 0: RECOVERING, 1 of 8 instances ready, waits for actor/0"]


@pytest.mark.parametrize("failed", [True, False])
def test_a_demo_that_failed_keeps_its_events_and_logs_and_says_where(failed: bool, tmp_path: Path) -> None:
    settings, told = load_settings({"home": str(tmp_path / "home")}), list[str]()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "rota.db").write_text("events")
    assert demo._end(settings, told.append, failed=failed) == []
    assert (tmp_path / "home" / "rota.db").exists() == failed
    assert any(str(tmp_path / "home") in line for line in told) == failed


def test_a_demo_that_does_not_start_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(demo.daemon, "up", Mock(side_effect=EngineUnavailable("no engine")))
    with pytest.raises(EngineUnavailable):
        demo.play(tmp_path / "report", lambda _: None)
    assert [one.name[:10] for one in tmp_path.iterdir()] == ["rota-demo-"]


@pytest.mark.slow
def test_clean_ends_kept_services_and_removes_folders_but_leaves_a_demo_that_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept, failed, plays, other = (tmp_path / name for name in ("rota-demo-a", "rota-demo-b", "rota-demo-c", "mine"))
    for home in (failed, plays, other):
        home.mkdir()
        (home / "rota.db").write_text("events")
    settings = load_settings({"home": str(kept), "port": 0, "pretend": demo.PRETEND})
    daemon.up(settings)
    record = daemon.find_service(Home.of(str(kept)))
    assert record is not None
    try:
        with file_locks.locked(plays / demo.PLAYS):
            done = rota("demo", "--clean", "--json")
        assert done.status == 0, done.err
        assert [(Path(one["home"]), "service" in one["ended"]) for one in done.document["items"]] == [
            (kept, True),
            (failed, False),
        ]
        assert sorted(one.name for one in tmp_path.iterdir()) == ["mine", "rota-demo-c"]
        assert process.identify(record["pid"]) is None
    finally:
        daemon.down(settings, force=True)
    assert rota("demo", "--clean").status == 0
    assert "no demo left anything" in rota("demo", "--clean").out
