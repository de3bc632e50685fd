"""The main job, killed three times and healed: what `rota demo` plays, judges and reports."""

from __future__ import annotations

import base64
import html
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rota
from rota.runtime import file_locks, process
from rota.runtime.clock import SystemClock, blocking_sleep, iso
from rota.runtime.environ import Home
from rota.service.client import Client
from rota.service.config import Settings, load_settings
from rota.service.process import daemon
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, RotaError, TimedOut
from rota.spec.ids import JobId
from rota.spec.resources import counted
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.models.jobs import JobDocument

PRETEND = "3x4x8"
HOME_PREFIX = "rota-demo-"
PLAYS = "plays.lock"
"""In the home of a demo: locked while it plays."""
REWARD_RISE_MIN = 0.25
PLAY_MAX_S = 460.0
"""The whole demonstration ends within 8 minutes; this leaves 20 s for start and end of the service."""
POLL_S = 0.25
EXPLAIN_LOOKS_MAX = 40
COMMITS_AFTER_KILL = 2
"""A kill counts as healed when this many further commits are in the log."""

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd}
.ok{color:#0a7d33}.bad{color:#b3261e}img,svg{max-width:100%}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}td,th{border-color:#333}}"""
WIDTH, HEIGHT = 900.0, 120.0

Say = Callable[[str], None]
Documents = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillStep:
    """Kill ``victim`` (``role/rank`` or ``master``) once the job has reached commit ``after``."""

    victim: str
    after: int


KILL_STEPS = (
    KillStep(victim="rollout/1", after=140),
    KillStep(victim="actor/1", after=170),
    KillStep(victim="master", after=200),
)


@dataclass(slots=True, kw_only=True)
class Kill:
    """One kill -9 and what came of it. ``at`` is commit, ``healed_s`` from the signal to the first commits after it."""

    victim: str
    pid: int
    at: int
    wall_s: float
    new_pid: int | None = None
    healed_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Everything the demonstration showed; ``problems`` is empty when it went as promised."""

    job: str
    state: str
    seconds: float
    commits: list[int]
    figures: dict[str, float]
    kills: list[Kill]
    waiting: Documents
    failures: Documents
    events: Documents
    problems: list[str]


def find_example() -> Path:
    """The job file of `examples/grpo_sums`. Raises BadInput where the examples are not installed."""
    found = Path(rota.__file__).resolve().parents[2] / "examples" / "grpo_sums" / "job.yaml"
    if not found.is_file():
        raise BadInput("the examples are not part of this installation", hint="run it from a checkout: make demo")
    return found


def play(report: Path, say: Say, *, keep: bool = False) -> Outcome:
    """Start a service of its own, run the job, kill and watch, write the report, end everything.

    With ``keep`` the service keeps running and its address is printed. Raises RotaError when something does not start.
    """
    example = find_example()
    home = Path(tempfile.mkdtemp(prefix=HOME_PREFIX))
    with file_locks.locked(home / PLAYS):
        return _play(home, example, report, say, keep=keep)


def _play(home: Path, example: Path, report: Path, say: Say, *, keep: bool) -> Outcome:
    settings = load_settings({"home": str(home), "port": 0, "pretend": PRETEND})
    clock = SystemClock()
    began_s = clock.monotonic_s()
    left: list[str] = []
    failed = False
    try:
        started = daemon.up(settings)
        say(f"service up with a pretend cluster {PRETEND}; home {home}; page {started['login']}")
        with _client(settings) as client:
            outcome = _scenario(client, example, say, began_s)
        outcome.seconds = round(clock.monotonic_s() - began_s, 1)
        page = write_report(report, outcome, Home.of(str(home)).job(JobId(outcome.job)).output)
        failed = bool(outcome.problems)
    except Exception:  # whoever stops it has seen enough, and wants nothing left
        failed = True
        raise
    finally:
        if keep:
            say(f"kept: ROTA_HOME={home} rota status; end it with ROTA_HOME={home} rota down")
        else:
            left = _end(settings, say, failed=failed)
    outcome.problems += [f"left behind: {each}" for each in left]
    say(f"report {page}  {page.as_uri()}")
    return outcome


def _end(settings: Settings, say: Say, *, failed: bool) -> list[str]:
    """End the service with all it started and take its folder away, unless it failed; what could not be ended."""
    document = daemon.down(settings, force=True)
    if failed:
        say(f"what happened is kept in {settings.root}: events in rota.db, output in jobs/*/logs")
        say(f"look at it with ROTA_HOME={settings.root} rota up --pretend {PRETEND}; an open job continues")
    else:
        shutil.rmtree(settings.root, ignore_errors=True)
    say(f"service {document['state']}: {', '.join(document['ended'])}")
    return [] if document["state"] == "down" else [str(each) for each in document["still_running"]]


def clean() -> JsonObject:
    """End the services that earlier demos of this user kept, and remove their folders and those of failed ones.

    A demo that plays now is left alone. What could not be ended keeps its folder, and is named.
    """
    items: list[JsonObject] = []
    for home in sorted(Path(tempfile.gettempdir()).glob(f"{HOME_PREFIX}*")):
        if home.is_symlink() or not home.is_dir() or home.stat().st_uid != os.getuid():
            continue
        try:
            with file_locks.locked(home / PLAYS, wait_s=0.0):
                done = daemon.down(load_settings({"home": str(home), "pretend": PRETEND}), force=True)
                left = [str(each) for each in done["still_running"]]
                if not left:
                    shutil.rmtree(home, ignore_errors=True)
        except TimedOut:
            continue
        items.append({"home": str(home), "ended": done["ended"], "still_running": left})
    return {"kind": "DemoClean", "items": items, "next": None}


def _client(settings: Settings) -> Client:
    record = daemon.find_service(Home.of(settings.home))
    assert record is not None, "up() returned"
    return Client(record["url"], (settings.root / "token").read_text(encoding="utf-8").strip())


def _scenario(client: Client, example: Path, say: Say, began_s: float) -> Outcome:
    """1 submit the job 2 fill the queue behind a full node 3 kill and watch 4 wait for the end 5 judge."""
    job: str = client.run(example, workdir=str(example.parent)).id
    say(f"{job} submitted: actor 2, ref 1, rollout 2, reward 2, loop 1")
    holder, waiting = _fill_queue(client, say)
    watch = _Watch(client, job, say, began_s)
    kills = [watch.kill(step) for step in KILL_STEPS]
    state = watch.until_end()
    for other in [*(one["job"] for one in waiting), holder]:
        client.stop(other, grace_s=0.0)
    events: Documents = list(client.events(job, follow=True))
    failures = client.failures(job)["items"]
    commits = [event["n"] for event in events if event["kind"] == "Committed"]
    outcome = Outcome(
        job=job,
        state=state,
        seconds=0.0,
        commits=commits,
        figures=_figures(events),
        kills=kills,
        waiting=waiting,
        failures=failures,
        events=events,
        problems=[],
    )
    outcome.problems = judge(outcome)
    _print_summary(outcome, say)
    return outcome


def _fill_queue(client: Client, say: Say) -> tuple[str, Documents]:
    """A job that holds one node, and two that cannot start beside it, with the reason of each."""
    holder: str = client.run(_sleeper("holder", 1, 8)).id
    waiting: list[dict[str, str]] = []
    for name, instances, gpus in (("pretrain", 12, 8), ("sweep", 89, 1)):
        other: str = client.run(_sleeper(name, instances, gpus)).id
        found = _explained(client, other)
        waiting.append({"job": other, "asks": f"{instances} x {counted(gpus, 'device')}", "why": found})
        say(f"{other} waits ({instances} x {counted(gpus, 'device')}): {found}")
    return holder, waiting


def _sleeper(name: str, instances: int, gpus: int) -> str:
    role = {"run": "sleep 3600", "replicas": instances, "resources": {"cpus": 0.05, "gpus": gpus}}
    return json.dumps({"name": name, "roles": {"main": role}})


def _explained(client: Client, job: str) -> str:
    """The reason of the scheduler, once it has looked at the job."""
    for _ in range(EXPLAIN_LOOKS_MAX):
        found = client.explain(job)
        if found["why"]:
            return f"{found['why']['code']}: {found['why']['text']}"
        blocking_sleep(POLL_S)
    return "not looked at yet"


class _Watch:
    """Looks at one job until the limit of the demonstration."""

    def __init__(self, client: Client, job: str, say: Say, began_s: float) -> None:
        self._client, self._job, self._say = client, job, say
        self._clock = SystemClock()
        self._deadline_s = began_s + PLAY_MAX_S
        self._commit, self._state = -1, ""

    def kill(self, step: KillStep) -> Kill:
        """Wait for the commit, kill, wait until the job commits again."""
        document = self._until(lambda doc: _commit(doc) >= step.after, f"commit {step.after}")
        pid = _pid(document, step.victim)
        found = process.identify(pid) if pid else None
        if found is None or not process.send_signal(found, signal.SIGKILL):
            raise TimedOut(f"{step.victim} of {self._job} was gone before it could be killed")
        kill = Kill(victim=step.victim, pid=found.pid, at=_commit(document), wall_s=self._clock.wall_s())
        self._say(f"commit {kill.at}: kill -9 {step.victim} (pid {kill.pid})")
        began_s = self._clock.monotonic_s()
        document = self._until(lambda doc: _healed(doc, kill), f"recovery of {step.victim}")
        kill.healed_s, kill.new_pid = round(self._clock.monotonic_s() - began_s, 2), _pid(document, kill.victim)
        self._say(f"commit {_commit(document)}: {step.victim} is back as pid {kill.new_pid}, {kill.healed_s} s")
        return kill

    def until_end(self) -> str:
        """The state in which the job ends."""
        return self._until(lambda doc: JobState(doc["state"]).terminal, "the end of the job")["state"]

    def _until(self, holds: Callable[[JobDocument], bool], what: str) -> JobDocument:
        while True:
            document = self._client.job(self._job)
            self._progress(document)
            if holds(document):
                return document
            if JobState(document["state"]).terminal:
                raise RotaError(f"{self._job} ended as {document['state']} before {what}: {document.get('error')}")
            if self._clock.monotonic_s() > self._deadline_s:
                raise TimedOut(
                    f"the demonstration has {PLAY_MAX_S:.0f} s and did not reach {what}: "
                    f"commit {_commit(document)}: {_state_text(document)}",
                    hint=f"the load is {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores: try again when it is less",
                )
            blocking_sleep(POLL_S)

    def _progress(self, document: JobDocument) -> None:
        commit = _commit(document)
        if commit and commit // 30 > self._commit // 30:
            metrics = document["progress"]["metrics"] if document["progress"] else {}
            self._say(f"commit {commit}: " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
        elif (state := _state_text(document)) != self._state:
            self._state = state
            if document["state"] != JobState.RUNNING:
                self._say(f"commit {commit}: {state}")
        self._commit = max(self._commit, commit)


def _state_text(document: JobDocument) -> str:
    return f"{document['state']}, {document.get('phase') or document.get('reason') or ''}"


def _commit(document: JobDocument) -> int:
    return document["progress"]["commit"] if document["progress"] else 0


def _pid(document: JobDocument, victim: str) -> int | None:
    if victim == "master":
        return document["master"]["pid"] if document["master"] else None
    return next((one["pid"] for one in document["instances"] if one["instance"] == victim), None)


def _healed(document: JobDocument, kill: Kill) -> bool:
    """Another process is in the place of the killed one, every instance is ready, and commits continue."""
    renewed = _pid(document, kill.victim) not in (None, kill.pid)
    ready = all(one["state"] == "READY" for one in document["instances"])
    return renewed and ready and _commit(document) >= kill.at + COMMITS_AFTER_KILL


def _figures(events: Documents) -> dict[str, float]:
    """Mean sampled reward over the first and the last ten reinforcement commits, from the log alone."""
    rewards = [
        event["metrics"]["reward"] for event in events if event["kind"] == "Committed" and "reward" in event["metrics"]
    ]
    if len(rewards) < 20:
        return {}
    before, after = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    return {"reward_before": before, "reward_after": after, "rise": after - before}


def judge(outcome: Outcome) -> list[str]:
    """What did not go as promised; empty when everything did."""
    found: list[str] = []
    if outcome.state != JobState.SUCCEEDED.value:
        found.append(f"the job ended as {outcome.state}")
    found += [f"{kill.victim} did not come back" for kill in outcome.kills if kill.healed_s is None]
    if len(outcome.kills) != len(KILL_STEPS):
        found.append(f"{len(outcome.kills)} of {len(KILL_STEPS)} kills were done")
    if outcome.commits != list(range(1, len(outcome.commits) + 1)) or not outcome.commits:
        found.append("the commits are not 1..N, each once")
    if outcome.figures.get("rise", 0.0) < REWARD_RISE_MIN:
        found.append(f"the reward rose by {outcome.figures.get('rise', 0.0):.3f}, less than {REWARD_RISE_MIN}")
    return found


def _print_summary(outcome: Outcome, say: Say) -> None:
    lines: list[tuple[str, str]] = []
    for one in outcome.failures:
        scope = ", ".join(each["instance"] for each in one["scope"])
        text = f"{one['instance']} {one['reason']} -> {one['level']} ({scope}), {one['seconds']} s"
        lines.append((one["seen_at"], text))
    seen = {one["instance"] for one in outcome.failures}
    for kill in (one for one in outcome.kills if one.victim not in seen):  # no instance was lost with the master
        text = f"{kill.victim} killed -> pid {kill.new_pid} in its place, no instance restarted, {kill.healed_s} s"
        lines.append((iso(kill.wall_s), text))
    for at, text in sorted(lines):
        say(f"{at}  {text}")
    if outcome.figures:
        say(f"reward {outcome.figures['reward_before']:.3f} -> {outcome.figures['reward_after']:.3f}")
    say(f"commits 1..{len(outcome.commits)}: {'each once' if not outcome.problems else 'see the problems below'}")


def document(outcome: Outcome) -> JsonObject:
    """The outcome as one JSON document."""
    return {"api": "rota/v1", "kind": "Demo", **asdict(outcome)}


def write_report(folder: Path, outcome: Outcome, job_output: Path) -> Path:
    """Write ``report.html``, ``report.json`` and the curve of the job into ``folder``; the path of the page."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps({"kind": "Demo", **asdict(outcome)}, indent=1) + "\n", "utf-8")
    curve = job_output / "curve.png"
    picture = ""
    if curve.is_file():
        data = curve.read_bytes()
        (folder / "curve.png").write_bytes(data)
        picture = f'<img alt="reward by commit" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
    page = folder / "report.html"
    page.write_text(_report_page(outcome, picture), encoding="utf-8")
    return page


def _report_page(outcome: Outcome, picture: str) -> str:
    verdict = "ok" if not outcome.problems else "bad"
    words = "all promises kept" if not outcome.problems else "; ".join(outcome.problems)
    reward = "{reward_before:.3f} → {reward_after:.3f}".format(**outcome.figures) if outcome.figures else "–"
    kills = [(one.victim, one.at, one.pid, one.new_pid, f"{one.healed_s} s") for one in outcome.kills]
    healed = [
        (one["seen_at"], one["instance"], one["reason"], one["level"], len(one["scope"]), one["seconds"])
        for one in outcome.failures
    ]
    waits = [(one["job"], one["asks"], one["why"]) for one in outcome.waiting]
    return "\n".join(
        (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Rota demo</title>',
            f"<style>{STYLE}</style><h1>Rota demo</h1>",
            f'<p class="{verdict}"><b>{html.escape(words)}</b></p>',
            f"<p>{html.escape(outcome.job)}: {outcome.state} in {outcome.seconds} s, commits 1..{len(outcome.commits)}"
            f", sampled reward {reward}</p>",
            picture,
            f"<h2>Commits and kills</h2>{_timeline(outcome)}",
            "<h2>Kills</h2>",
            _table(("killed", "at commit", "pid", "new pid", "commits again after"), kills),
            "<h2>Recoveries</h2>",
            _table(("seen", "cause", "reason", "level", "instances", "seconds"), healed),
            "<h2>Why others wait</h2>",
            _table(("job", "asks", "why"), waits),
            "</html>\n",
        )
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _time_s(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def _timeline(outcome: Outcome) -> str:
    """Commits over the seconds of the job as a line, each kill as a red mark."""
    points = [(_time_s(one["at"]), one["n"]) for one in outcome.events if one["kind"] == "Committed"]
    if len(points) < 2:
        return "<p>no commits</p>"
    start, end, top = points[0][0], points[-1][0], points[-1][1]

    def across(at: float) -> float:
        return (at - start) / (end - start or 1.0) * WIDTH

    line = " ".join(f"{across(at):.1f},{HEIGHT - n / top * HEIGHT:.1f}" for at, n in points)
    marks = "".join(
        f'<line x1="{across(one.wall_s):.1f}" x2="{across(one.wall_s):.1f}" y1="0" y2="{HEIGHT}" stroke="#b3261e"/>'
        f'<text x="{across(one.wall_s) + 4:.1f}" y="12" fill="#b3261e" font-size="12">{html.escape(one.victim)}</text>'
        for one in outcome.kills
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 4}" role="img" aria-label="commits over time">'
        f'<polyline points="{line}" fill="none" stroke="#08519c" stroke-width="2"/>{marks}</svg>'
    )
