"""The main job, killed three times and healed: what a newcomer sees first, in an installation of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rota.service.client import Client
from rota.service.config import Settings, load_settings
from rota.service.daemon import down, up
from rota.service.verbs.start import template_files
from rota.spec.errors import NotReachable
from rota.spec.states import JobState

PRETEND = "3x4x8"
PREFIX = "rota-demo-"
JOB_LIMIT_S = 900.0
HOLDER = """\
name: holder
roles: {main: {run: [sleep, "1800"], resources: {cpus: 0.1, gpus: 8}}}
time_limit: 30m
"""
BIG = """\
name: big
roles: {main: {run: [sleep, "1"], replicas: 12, resources: {cpus: 0.1, gpus: 8}}}
time_limit: 30m
"""
MEAN_OF = 10
"""Commits over which the reward before and after is averaged."""

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Kill:
    """One planned death: after which commit, of what; then the pid, when, and when it was over."""

    at_commit: int
    what: str
    pid: int = 0
    at: str = ""
    healed_s: float | None = None
    lost_commits: int = 0


@dataclass(slots=True, kw_only=True)
class Show:
    """What is shown: the job file, the commits after which something dies, and what has been seen so far."""

    job_file: Path
    kills: list[Kill]
    rewards: dict[int, float] = field(default_factory=dict[int, float])


def play(*, keep: bool, say: Say) -> dict[str, Any]:
    """``DemoReport``: start everything, kill, watch it heal, end everything but for ``keep``.

    Raises what the service raises when it cannot start. Writes ``rota-demo.json`` into the present folder.
    """
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    settings = load_settings({"home": str(home), "port": 0, "pretend": PRETEND})
    began = datetime.now(UTC)
    try:
        # 1 a service of its own, on a pretend cluster of 3 racks, 4 nodes each, 8 devices each
        status = up(settings)
        say(f"service ready at {status['url']}, pretend cluster {PRETEND}; its page: {status['login']}")
        token = (home / "token").read_text(encoding="utf-8").strip()
        with Client(str(status["url"]), token) as client:
            # 2 a queue, and why a job in it waits
            explanation = _queue(client, say)
            # 3 the main job, with three deaths on the way
            show = _main_job(home)
            job = client.run(show.job_file).id
            say(f"{job} submitted: {show.job_file}")
            _watch(client, job, show, say)
            document = client.wait(job, timeout_s=JOB_LIMIT_S)
            failures = client.failures(job)
            # 4 what it came to
            report = _report(document, failures, show, explanation, seconds=(datetime.now(UTC) - began).total_seconds())
    finally:
        if not keep:
            down(settings, force=True)
            shutil.rmtree(home, ignore_errors=True)
    if keep:
        report |= {"url": status["login"], "home": str(home)}
        say(f"it stays: ROTA_HOME={home}   page: {status['login']}   end it: rota demo --clean")
    path = Path("rota-demo.json").absolute()
    path.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return report | {"report": str(path)}


def clean() -> list[str]:
    """End and remove what earlier demos with ``--keep`` left; the folders that went."""
    gone: list[str] = []
    for home in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if home.is_dir() and home.stat().st_uid == os.getuid():
            down(Settings(home=str(home)), force=True)
            shutil.rmtree(home, ignore_errors=True)
            gone.append(str(home))
    return gone


def _queue(client: Client, say: Say) -> dict[str, Any]:
    client.run(HOLDER)
    big = client.run(BIG).id
    explanation = client.explain(big)
    for _ in client.events(big, follow=True):  # each event is a reason to look again
        explanation = client.explain(big)
        if explanation["state"] == JobState.QUEUED and explanation["why"]:
            break
    say(f"why {big} waits: {explanation['why']['code']}: {explanation['why']['text']}")
    return explanation


def _main_job(home: Path) -> Show:
    """The job of examples/grpo_sums where the examples are, else the PPO template."""
    example = Path(__file__).resolve().parents[3] / "examples" / "grpo_sums" / "job.yaml"
    needed = ("torch", "reasoning_gym", "tensorboard", "matplotlib")
    if example.is_file() and all(importlib.util.find_spec(name) for name in needed):
        return Show(job_file=example, kills=_kills(30, 140, 180))
    folder = home / "ppo"
    folder.mkdir()
    for name, text in template_files("ppo").items():
        (folder / name).write_text(text, encoding="utf-8")
    return Show(job_file=folder / "job.yaml", kills=_kills(8, 16, 24))


def _kills(first: int, second: int, third: int) -> list[Kill]:
    return [
        Kill(at_commit=first, what="actor/0"),
        Kill(at_commit=second, what="rollout/0"),
        Kill(at_commit=third, what="master"),
    ]


def _watch(client: Client, job: str, show: Show, say: Say) -> None:
    """Read the events of the job; kill what is due; note when it is whole again."""
    open_kill: Kill | None = None
    for event in client.events(job, follow=True):
        match event["kind"]:
            case "Committed":
                if "reward" in event["metrics"]:
                    show.rewards[event["n"]] = event["metrics"]["reward"]
                if event["n"] % 50 == 0:
                    say(f"  commit {event['n']}{_metrics(event['metrics'])}")
                due = next((one for one in show.kills if not one.pid and one.at_commit <= event["n"]), None)
                if due is not None and open_kill is None:
                    open_kill = due
                    _kill(client, job, due, say)
            case "FailoverStarted" if open_kill is not None:
                words = f"{event['level']} level, {len(event['scope'])} instances, from commit {event['restore']}"
                say(f"  decided: {words}")
            case "RolledBack" if open_kill is not None:
                open_kill.lost_commits += event["from_commit"] - event["to_commit"]
            case "FailoverEnded" if open_kill is not None and open_kill.what != "master":
                open_kill = _healed(open_kill, event, say)
            case "Reattached" if open_kill is not None and open_kill.what == "master":
                open_kill = _healed(open_kill, event, say)
            case _:
                pass


def _kill(client: Client, job: str, kill: Kill, say: Say) -> None:
    document = client.job(job)
    if kill.what == "master":
        kill.pid = int((document["master"] or {}).get("pid") or 0)
    else:
        kill.pid = next(int(one["pid"] or 0) for one in document["instances"] if one["instance"] == kill.what)
    if kill.pid <= 1:
        raise NotReachable(f"{kill.what} of {job} has no process to kill", hint="see rota show")
    kill.at = datetime.now(UTC).isoformat()
    os.kill(kill.pid, signal.SIGKILL)
    say(f"killed {kill.what} (pid {kill.pid}) after commit {kill.at_commit}")


def _healed(kill: Kill, event: Mapping[str, Any], say: Say) -> None:
    kill.healed_s = round((datetime.fromisoformat(event["at"]) - datetime.fromisoformat(kill.at)).total_seconds(), 2)
    say(f"healed {kill.what} after {kill.healed_s} s, {kill.lost_commits} commits lost")


def _metrics(metrics: Mapping[str, Any]) -> str:
    shown = [f"{name} {value:.3f}" for name, value in metrics.items() if isinstance(value, float)]
    return ": " + ", ".join(shown[:3]) if shown else ""


def _report(
    document: Mapping[str, Any],
    failures: Mapping[str, Any],
    show: Show,
    explanation: Mapping[str, Any],
    *,
    seconds: float,
) -> dict[str, Any]:
    rewards = [show.rewards[n] for n in sorted(show.rewards)]
    few = max(1, min(MEAN_OF, len(rewards) // 2))
    before, after = (sum(part) / few if rewards else None for part in (rewards[:few], rewards[-few:]))
    healed = all(kill.healed_s is not None for kill in show.kills)
    learned = before is not None and after is not None and after > before
    return {
        "api": "rota/v1",
        "kind": "DemoReport",
        "ok": document["state"] == JobState.SUCCEEDED and healed and learned,
        "job": document["id"],
        "state": document["state"],
        "commits": (document.get("progress") or {}).get("commit"),
        "reward": {"before": before, "after": after, "mean_of": few},
        "kills": [asdict(kill) for kill in show.kills],
        "failures": failures["items"],
        "explanation": dict(explanation),
        "seconds": round(seconds, 1),
    }
