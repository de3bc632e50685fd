"""A job of four roles under random faults: kill -9 and SIGSTOP of every kind of process, single and double.

``python benchmarks/chaos.py [--minutes M] [--every S] [--seed N] [--json]``. After each fault it is measured when every
part that was hit is in service again (another process, which answers) and when the job commits again; the next fault
comes ``--every`` seconds after the last, or when all is back. At the end no commit is lost or there twice, the weights
equal those of a run without faults bit by bit, the job has succeeded and nothing is left of it (processes, actors and
placement groups of the engine, names and segments of tensors): else the exit status is 1 and ``wrong`` says why.
Goodput is commits that count x fault-free step time / wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from calls import LIMIT_S, TERMINAL, WORKLOADS, Records, client_of, free_port, machine
from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.process import SUPERVISOR, ProcessId, RunFolder
from rota.runtime.ray.client import RECORD
from rota.runtime.ray.engine import EngineFiles, find_engine
from rota.runtime.redis.client import RegistryAddress
from rota.runtime.redis.server import socket_path
from rota.service.config import load_settings
from rota.service.process import daemon
from rota.spec.errors import RotaError
from rota.spec.events import Committed, FailoverStarted, InstanceStarted, MasterStarted, PartReplaced, RolledBack
from rota.spec.ids import JobId
from rota.tensors.session import shm_root
from run import Row, hand_in

sys.path.insert(0, str(WORKLOADS))
import chaotic

QUIET_S = 12.0
"""Without faults at the beginning, which gives the usual time of a step."""
BACK_MAX_S = 180.0
"""What is not back by then is wrong."""
LOOK_S = 0.05
LEFT_MAX_S = 60.0
"""After the end of the job, for what it had to go."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
ROLES = ("learner", "rollout", "judge", "loop")
SOURCE = """
name: chaos
roles:
  learner: {workload: "chaotic:Learner", resources: {cpus: 0.2}, fail: {restart: process, limit: 1000/10m}}
  rollout:
    {workload: "chaotic:Rollout", replicas: 2, resources: {cpus: 0.2}, fail: {restart: process, limit: 1000/10m}}
  judge: {workload: "chaotic:Judge", resources: {cpus: 0.2}, fail: {restart: process, limit: 1000/10m}}
  loop: {workload: "chaotic:training", resources: {cpus: 0.2}, fail: {restart: process, limit: 1000/10m}}
env: {OMP_NUM_THREADS: "1", OPENBLAS_NUM_THREADS: "1"}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One process that got a signal."""

    part: str
    signal: str
    which: ProcessId


@dataclass(slots=True)
class Fault:
    """What was done at once, and when what was back, in seconds since."""

    at_s: float
    hits: list[Hit]
    back_s: dict[str, float] = field(default_factory=dict[str, float])
    job_s: float | None = None

    @property
    def name(self) -> str:
        return " + ".join(sorted(f"{hit.part} {hit.signal}" for hit in self.hits))

    def document(self) -> dict[str, Any]:
        back = {part: round(seconds, 1) for part, seconds in self.back_s.items()}
        job_s = None if self.job_s is None else round(self.job_s, 1)
        return {"at_s": round(self.at_s, 1), "fault": self.name, "back_s": back, "job_s": job_s}


class Site:
    """One installation with one job, and where each kind of process is found."""

    def __init__(self, home: Home, rng: random.Random) -> None:
        self.home, self.rng = home, rng
        self.run = RunFolder(home.run)
        self.log = SqlLog(home.db_url)
        self.job = JobId(str(self._submit()))
        self.records = Records(self.log, self.job)
        self.last_worker = ""

    def _submit(self) -> str:
        body = {"source": SOURCE, "filename": "chaos.yaml", "workdir": str(WORKLOADS)}
        return daemon.ask(self.home, "POST", "/api/v1/jobs", body)["id"]

    def events(self, *kinds: type) -> list[Any]:
        """Events of the job of these kinds."""
        return [one.event for one in self.records.now() if isinstance(one.event, kinds)]

    def committed(self) -> int:
        """How many commits count."""
        n = 0
        for one in self.events(Committed, RolledBack):
            n = one.n if isinstance(one, Committed) else one.to_commit
        return n

    def state(self) -> str:
        """The state of the job; empty while no service answers."""
        with contextlib.suppress(RotaError, OSError, ValueError, KeyError):
            return str(daemon.ask(self.home, "GET", f"/api/v1/jobs/{self.job}")["state"])
        return ""

    # -- where the parts are ------------------------------------------------------------------------------------------

    def workers(self) -> dict[str, ProcessId]:
        """The newest process of each instance that lives."""
        found = {
            f"{one.role}/{one.rank}": ProcessId(pid=one.pid, start_time=one.start_time)
            for one in self.events(InstanceStarted)
        }
        return {name: which for name, which in found.items() if process.is_alive(which)}

    def worker(self) -> ProcessId | None:
        """A random instance."""
        found = self.workers()
        self.last_worker = self.rng.choice(sorted(found)) if found else ""
        return found.get(self.last_worker)

    def same_worker(self) -> ProcessId | None:
        """Who has the place of the instance that was taken last."""
        return self.workers().get(self.last_worker)

    def master(self) -> ProcessId | None:
        found = self.events(MasterStarted)
        return process.identify(found[-1].pid) if found else None

    def service(self) -> ProcessId | None:
        record = daemon.find_service(self.home)
        answers = False
        with contextlib.suppress(RotaError, OSError, ValueError):
            answers = bool(daemon.ask(self.home, "GET", "/readyz").get("ok"))
        return daemon.identity_of(record) if record is not None and answers else None

    def recorded(self, name: str) -> ProcessId | None:
        record = self.run.find_alive(name)
        return None if record is None else record.id

    def engine(self, part: str) -> ProcessId | None:
        head = find_engine(self.home.root)
        found = None if head is None else head.gcs if part == "control store" else head.raylet
        return found if found is not None and process.is_alive(found) else None

    def registry(self) -> ProcessId | None:
        for path in self.home.run.glob("registry-*/registry.json"):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(path.read_text())
                which = ProcessId(pid=found["pid"], start_time=found["start_time"])
                return which if process.is_alive(which) else None
        return None

    def pump(self) -> ProcessId | None:
        """The process that writes the log of the loop."""
        wanted = str(self.home.job(self.job).logs / "loop-0.log")
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        found = [pid for pid in pids if wanted in (words := process.command_line(pid)) and "output_pump.py" in words]
        return process.identify(found[0]) if found else None

    def watcher(self) -> ProcessId | None:
        names = [path.stem for path in EngineFiles(self.home.root).folder.glob("node-*.json")]
        return self.recorded(f"engine-{names[0].removeprefix('node-')}") if names else None

    def parts(self) -> dict[str, Callable[[], ProcessId | None]]:
        """What can be hit, and how its process is found."""
        return {
            "worker": self.worker,
            "master": self.master,
            "service": self.service,
            "gateway": lambda: self.recorded(RECORD),
            "control store": lambda: self.engine("control store"),
            "raylet": lambda: self.engine("raylet"),
            "registry": self.registry,
            "log pump": self.pump,
            "watcher": self.watcher,
            "supervisor": lambda: self.recorded(SUPERVISOR),
        }

    # -- faults -------------------------------------------------------------------------------------------------------

    def strike(self, since_s: float, parts: list[str], signals: list[signal.Signals]) -> Fault:
        """Send each part its signal."""
        fault = Fault(at_s=time.monotonic() - since_s, hits=[])
        targets = [(part, self.parts()[part](), number) for part, number in zip(parts, signals, strict=True)]
        for part, which, number in targets:
            if which is not None and process.send_signal(which, number):
                name = f"worker {self.last_worker}" if part == "worker" else part
                fault.hits.append(Hit(part=name, signal=number.name, which=which))
        return fault

    def until_back(self, fault: Fault) -> str:
        """Wait until each part has another process and the job commits again; what is not back, empty if all is."""
        began_s, since_n = time.monotonic(), None
        finders = self.parts() | {f"worker {self.last_worker}": self.same_worker}
        while True:
            passed_s = time.monotonic() - began_s
            for hit in fault.hits:
                if hit.part not in fault.back_s and (now := finders[hit.part]()) is not None and now != hit.which:
                    fault.back_s[hit.part] = passed_s
            missing = [hit.part for hit in fault.hits if hit.part not in fault.back_s]
            if not missing and since_n is None:  # what was committed before a part was ended is no sign of life
                since_n = self.committed()
            if since_n is not None and self.committed() > since_n + 1:
                fault.job_s = passed_s
            if not missing and fault.job_s is not None:
                return ""
            if passed_s > BACK_MAX_S:
                return f"{fault.name}: not back within {BACK_MAX_S:.0f} s: {', '.join(missing) or 'the job'}"
            time.sleep(LOOK_S)


def storm(site: Site, given: argparse.Namespace) -> dict[str, Any]:
    """Quiet time, faults, and the end of the job."""
    deadline = time.monotonic() + LIMIT_S
    while site.committed() < 5:
        if site.state() in TERMINAL or time.monotonic() > deadline:
            raise SystemExit(f"{site.job} is {site.state()} and never ran")
        time.sleep(LOOK_S)
    first, began_s = site.committed(), time.monotonic()
    time.sleep(QUIET_S)
    step_s = (time.monotonic() - began_s) / max(1, site.committed() - first)
    faults, wrong = list[Fault](), list[str]()
    start_n, since_s = site.committed(), time.monotonic()
    names = given.parts.split(",") if given.parts else sorted(site.parts())
    bag: list[str] = []
    while time.monotonic() - since_s < given.minutes * 60 and not wrong:
        count = 2 if site.rng.random() < given.doubles else 1
        chosen = list[str]()
        while len(chosen) < min(count, len(names)):  # each kind as often as any other
            bag = bag or site.rng.sample(names, len(names))
            if (name := bag.pop()) not in chosen:
                chosen.append(name)
        signals = [site.rng.choice([one for one in SIGNALS if given.signal in ("", one.name)]) for _ in chosen]
        fault = site.strike(since_s, chosen, signals)
        if not fault.hits:
            continue
        began_s = time.monotonic()
        faults.append(fault)
        wrong += [text for text in [site.until_back(fault)] if text]
        if not given.json or wrong:
            print(json.dumps(fault.document()), file=sys.stderr, flush=True)
        time.sleep(max(0.0, given.every - (time.monotonic() - began_s)))
    wall_s, done = time.monotonic() - since_s, site.committed() - start_n
    (site.home.job(site.job).output / "go").touch()
    until_s = time.monotonic() + LIMIT_S
    while (state := site.state()) not in TERMINAL and time.monotonic() < until_s:
        time.sleep(0.2)
    wrong += [] if state == "SUCCEEDED" else [f"the job is {state or 'unknown: the service does not answer'}"]
    left = {"processes": left_of_job(site), "in the engine": left_in_engine(site), "tensors": left_of_tensors(site)}
    wrong += commits_wrong(site) + [f"{text} is left" for found in left.values() for text in found]
    return {
        "goodput": round(done * step_s / wall_s, 4),
        "wall_s": round(wall_s, 1),
        "commits": site.committed(),
        "step_s": round(step_s, 4),
        "state": state,
        "wrong": wrong,
        "recoveries": len(site.events(FailoverStarted)),
        "noted": sum(isinstance(one.event, PartReplaced) for one in Records(site.log).now()),
        "left": {what: len(found) for what, found in left.items()},
        "back_s": summary(faults),
        "faults": [fault.document() for fault in faults],
    }


def commits_wrong(site: Site) -> list[str]:
    """Commits that are missing or twice in the log or in the file of the loop, or whose weights are others."""
    kept: dict[int, str] = {}
    for one in site.events(Committed, RolledBack):
        if isinstance(one, RolledBack):
            kept = {n: text for n, text in kept.items() if n <= one.to_commit}
        elif one.n in kept:
            return [f"commit {one.n} is there twice"]
        else:
            kept[one.n] = str(one.metrics["checksum"])
    wanted = dict(enumerate(chaotic.reference(len(kept)), 1))
    found: dict[int, str] = {}
    for line in (site.home.job(site.job).output / "commits.txt").read_text().splitlines():
        n, _, text = line.partition(" ")
        found[int(n)] = text
    wrong = [] if sorted(kept) == sorted(wanted) else [f"commits {sorted(set(wanted) - set(kept))} are not in the log"]
    wrong += [f"commit {n}: the weights are others" for n, text in wanted.items() if kept.get(n, text) != text][:5]
    wrong += [f"commit {n} is not in the file of the loop" for n in kept if found.get(n) != kept[n]][:5]
    return wrong


def left_of_job(site: Site) -> list[str]:
    """Processes of the job that still run after its end."""
    return gone_within(lambda: [f"process {name}" for name in sorted(site.workers())])


def left_in_engine(site: Site) -> list[str]:
    """Actors and placement groups of the job that the engine still has, by a client of its own."""
    address, environment = client_of(site.home)
    words = [sys.executable, __file__, "--engine", address, "--job", site.job]

    return gone_within(lambda: listed(words, environment, lambda text: json.loads(text.splitlines()[-1])))


def engine_main(address: str, job: str) -> None:
    """The client: one line of JSON, what the engine has with the job in its name."""
    import ray
    from ray.util import list_named_actors, placement_group_table

    ray.init(address, log_to_driver=False, logging_level="error")
    actors = [f"actor {one['name']}" for one in list_named_actors(all_namespaces=True)]
    groups = [f"placement group {one['name']}" for one in placement_group_table().values() if one["state"] != "REMOVED"]
    print(json.dumps(sorted(text for text in (*actors, *groups) if job in text)))


def left_of_tensors(site: Site) -> list[str]:
    """Names of tensors after the end of the only job."""
    words = [sys.executable, "-m", "rota", "tensors", "ls", "--json"]
    environment = os.environ | {"ROTA_HOME": str(site.home.root)}

    def names(text: str) -> list[str]:
        return [f"tensor {one['name']}" for one in json.loads(text)["items"]]

    return gone_within(lambda: listed(words, environment, names))


def listed(words: list[str], environment: dict[str, str], read: Callable[[str], list[str]]) -> list[str]:
    """What a command prints; that it failed is a finding too."""
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return read(done.stdout) if done.returncode == 0 else [f"no answer from {words[1:4]}: {done.stderr[-300:]}"]


def gone_within(look: Callable[[], list[str]]) -> list[str]:
    """What is still found after ``LEFT_MAX_S`` of looking; empty as soon as nothing is."""
    until_s = time.monotonic() + LEFT_MAX_S
    while (left := look()) and time.monotonic() < until_s:
        time.sleep(0.5)
    return left


def rows(found: dict[str, Any]) -> list[Row]:
    """The figures of a run as rows of the table; what was wrong first."""
    left = sum(found.get("left", {}).values())
    made = [Row("findings under faults", len(found["wrong"]), "", 0.0), Row("left behind by the job", left, "", 0.0)]
    if "goodput" in found:
        made.append(Row(f"time lost to {len(found['faults'])} faults", 100 * (1 - found["goodput"]), "%"))
    for part, one in found.get("back_s", {}).items():
        made.append(Row(f"the job commits again after {part}, at most", one["job_max_s"], "s"))
    return made


def summary(faults: list[Fault]) -> dict[str, Any]:
    """Median and maximum of the seconds until the part, and until the job, was back; by part and signal."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for fault in faults:
        single = fault.hits[0].part.split()[0] if fault.hits[0].part.startswith("worker") else fault.hits[0].part
        key = f"{single} {fault.hits[0].signal}" if len(fault.hits) == 1 else "two at once"
        rows.setdefault(key, []).append((max(fault.back_s.values(), default=BACK_MAX_S), fault.job_s or BACK_MAX_S))
    return {
        key: {
            "n": len(values),
            "part_median_s": round(statistics.median(part for part, _ in values), 1),
            "part_max_s": round(max(part for part, _ in values), 1),
            "job_median_s": round(statistics.median(job for _, job in values), 1),
            "job_max_s": round(max(job for _, job in values), 1),
        }
        for key, values in sorted(rows.items())
    }


def of_home(home: Path) -> list[str]:
    """Command lines of the processes that name the home in their command or environment."""
    found, mark = list[str](), str(home).encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid() and process.identify(int(entry.name)):
                text = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
                found += [process.command_line(int(entry.name))[:200]] if mark in text else []
    return found


def segments(home: Home) -> Path:
    """The folder of the shared memory of an installation."""
    return shm_root(RegistryAddress(path=str(socket_path(home))).url)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--doubles", type=float, default=0.3, help="share of faults that hit two processes")
    parser.add_argument("--parts", default="", help="only these, with commas between them")
    parser.add_argument("--signal", default="", choices=["", *(one.name for one in SIGNALS)])
    parser.add_argument("--json", action="store_true", help="print nothing but the document")
    parser.add_argument("--keep", action="store_true", help="leave the home behind, as after a bad run")
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        engine_main(given.engine, given.job)
        return 0
    root = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    settings = load_settings({"home": str(root), "port": free_port()}, environ={})
    daemon.up(settings)
    found: dict[str, Any] = {"wrong": []}
    try:
        found = storm(Site(Home.of(settings.home), random.Random(given.seed)), given)
    finally:
        ended = daemon.down(settings, force=bool(found["wrong"]))
        found["wrong"] += [f"down: {ended['text'] or ended['still_running']}"] if ended["state"] != "down" else []
        found["wrong"] += [f"left behind: {text}" for text in of_home(root)]
        if not (given.keep or found["wrong"]):
            shutil.rmtree(root, ignore_errors=True)
    if (left := segments(Home.of(root))).exists():
        found["wrong"].append(f"shared memory left behind: {left}")
    hand_in(rows(found))
    print(json.dumps({**found, "seed": given.seed, "every_s": given.every, "machine": machine()}, indent=2))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
