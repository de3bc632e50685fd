"""The service killed with SIGKILL anywhere in a submit, stop or scale: what was acknowledged is there, and once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from standing import listening, standing

import rota
from rota.runtime.event_log.sql import SqlLog
from rota.spec.events import JobSubmitted, ScaleAsked, StopAsked

DEATHS = 300 if os.environ.get("ROTA_DEEP") else 6
LINES_MAX = 260
"""A kill comes within so many lines of the watched functions; a submit runs some 150 of them."""
WATCHED = {
    "service/control/intake.py": None,
    "service/rest/routes/jobs.py": None,
    "service/rest/audit.py": None,
    "service/rest/app.py": None,
    "service/control/loop.py": {"append", "wait_for"},
    "runtime/event_log/sql.py": {"append", "_row", "advance", "writing"},
    "runtime/process.py": {"write_private"},
    "runtime/environ.py": {"make"},
}
"""Where an operation passes on its way to the disk and back: whole files, or those functions of them."""
ELASTIC = """\
name: {name}
roles:
  main: {{run: [sleep, "9"], replicas: {{min: 1, max: 4}}, mesh: {{dp: "*"}}, resources: {{gpus: 2, cpus: 1}}}}
  held: {{run: [sleep, "9"], resources: {{gpus: 4}}}}
"""


def kill_after(lines: int) -> None:
    """Arm this process: it dies at that line of the watched functions, in whichever thread that is."""
    root = str(Path(rota.__file__).parent) + "/"
    left, lock = [lines], threading.Lock()

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            with lock:
                left[0] -= 1
                if left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return count

    def choose(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename.removeprefix(root)
        functions = WATCHED.get(name, ())
        return count if functions is None or frame.f_code.co_name in functions else None

    threading.settrace_all_threads(choose) if sys.version_info >= (3, 12) else threading.settrace(choose)
    sys.settrace(choose)


class Victim:
    """A service in a child that is killed at a random line; the next one goes on over the same home."""

    def __init__(self, home: Path, rng: random.Random) -> None:
        self._home, self._rng = home, rng
        self.deaths, self._pid, self._url = 0, 0, ""

    def start(self) -> None:
        read, write = os.pipe()
        lines = self._rng.randint(1, LINES_MAX)
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(read)
                asyncio.run(self._serve(write, lines))
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as told:
            self._url = told.read()

    async def _serve(self, told: int, lines: int) -> None:
        async with standing(self._home) as service, listening(service) as http:
            os.write(told, f"{http.base_url} {http.headers['authorization']}".encode())
            os.close(told)
            kill_after(lines)
            await asyncio.Event().wait()

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        """The answer to one request, asked again of the next service whenever one dies under it."""
        while True:
            url, _, token = self._url.partition(" ")
            try:
                headers = {"Authorization": token, **given.pop("headers", {})}
                given["headers"] = headers
                with httpx.Client(base_url=url, timeout=20, trust_env=False) as http:
                    return http.request(method, path, **given)
            except httpx.TransportError:
                assert os.waitpid(self._pid, 0)[1] == signal.SIGKILL
                self.deaths += 1
                given["headers"].pop("Authorization")
                self.start()

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_a_killed_service_acknowledged_is_there_once_whatever_line_it_died_at(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    victim = Victim(tmp_path, random.Random(seed))
    victim.start()
    wanted: set[str] = set()
    stopped: set[str] = set()
    sized: dict[str, int] = {}
    number = 0
    try:
        while victim.deaths < DEATHS:
            number += 1
            key = {"Idempotency-Key": f"key-{number}"}
            body = {"source": ELASTIC.format(name=f"job{number}")}
            answer = victim.ask("POST", "/api/v1/jobs", json=body, headers=key)
            assert answer.status_code in (200, 201), (seed, answer.text)
            job = answer.json()["id"]
            assert job == f"job{number}-1", (seed, "a retry under the same key made another job")
            wanted.add(job)
            answer = victim.ask("POST", f"/api/v1/jobs/{job}:scale", json={"role": "main", "n": 1 + number % 3})
            assert answer.status_code == 202, (seed, answer.text)
            sized[job] = 1 + number % 3
            if number % 2:
                answer = victim.ask("POST", f"/api/v1/jobs/{job}:stop", json={"grace_s": 1})
                assert answer.status_code in (202, 409), (seed, answer.text)  # 409: the first try did it
                stopped.add(job)
    finally:
        victim.end()
    log = SqlLog(f"sqlite:///{tmp_path}/rota.db")  # refuses a log that lost what it acknowledged
    events = [(record.job, record.event) for page in iter_pages(log) for record in page]
    log.close()
    submits = Counter(job for job, event in events if isinstance(event, JobSubmitted))
    assert submits == Counter(wanted), seed
    assert {job for job, event in events if isinstance(event, StopAsked)} == stopped, seed
    assert {str(job): event.n for job, event in events if isinstance(event, ScaleAsked)} == sized, seed
    assert all((tmp_path / "jobs" / job / "logs").is_dir() for job in wanted), seed


def iter_pages(log: SqlLog) -> Any:
    after = 0
    while records := log.read(after=after):
        yield records
        after = records[-1].number
