"""The live line of `rota run`: on a terminal, and nowhere else."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standing import Standing, listening, with_service

from rota.service.cli.verbs.live import ERASE, LiveLine, waiting_text
from rota.spec.states import JobState

JOB: dict[str, Any] = {
    "id": "big-1",
    "state": "QUEUED",
    "since": "2026-01-31T12:00:00+00:00",
    "phase": "",
    "text": "Needs 16 GPUs; 9 are free.",
}
WAITS: dict[str, Any] = {
    "waiting": True,
    "why": {"code": "NO_FREE_DEVICES", "text": "Needs 16 GPUs; 3 are free.", "fields": {}},
    "ahead": {"jobs": 2, "gpus": 8.0},
    "estimate": {"p10": None, "p50": "2026-01-31T13:00:00+00:00", "p90": None, "basis": "", "age_s": 0.0},
}


def test_the_line_of_a_waiting_job_has_reason_place_and_estimate_and_what_changed() -> None:
    text = waiting_text(JOB, WAITS, ahead_before=5)  # type: ignore[arg-type]
    assert (
        text.startswith("big-1 QUEUED ") and "Needs 16 GPUs; 3 are free · 2 jobs ahead (was 5) · starts about" in text
    )
    started = JOB | {"state": "STARTING", "phase": "1 of 4 instances ready, waits for a/1", "text": ""}
    assert waiting_text(started, None).endswith("· 1 of 4 instances ready, waits for a/1")  # type: ignore[arg-type]
    assert waiting_text(JOB | {"state": "FAILED"}, None) == ""  # type: ignore[arg-type]


def test_the_line_is_cut_to_the_terminal_and_makes_room_for_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = io.StringIO()
    line = LiveLine(out, live=True)
    line.draw("x" * 100)
    with line.paused():
        out.write("output\n")
    drawn, output = out.getvalue().removeprefix(ERASE).split(ERASE)
    assert (len(drawn), output) == (19, "output\n")
    silent = io.StringIO()
    LiveLine(silent, live=False).draw("never")
    assert silent.getvalue() == ""


def on_terminal(words: list[str], env: dict[str, str], *, at: Callable[[str], bool]) -> str:
    """What a command has written to a terminal of its own by the time that ``at`` is true of it; then Ctrl-C."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "rota", *words]
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env, start_new_session=True)
    os.close(terminal)
    seen = ""
    try:
        while child.poll() is None or select.select([controller], [], [], 0)[0]:
            if select.select([controller], [], [], 30)[0]:
                try:
                    seen += os.read(controller, 65536).decode()
                except OSError:  # the terminal was closed at the other end
                    break
            if at(seen):
                child.send_signal(2)
                at = bool  # once
    finally:
        child.kill()
        child.wait()
        os.close(controller)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("more", "live"), [((), True), (("--quiet",), False), (("--json", "-w"), False)])
def test_run_on_a_terminal_shows_why_the_job_waits_until_it_starts(
    tmp_path: Path, more: tuple[str, ...], live: bool
) -> None:
    async def test(service: Standing) -> None:
        holder = "name: holder\nroles:\n  main:\n    run: [echo, hi]\n    resources: {gpus: 4}\n    replicas: 2\n"
        await service.submit(holder)
        await service.until("holder-1", JobState.ADMITTED)
        async with listening(service) as http:
            token = http.headers["authorization"].split()[1]
            env = {"ROTA_HOME": str(tmp_path / "cli"), "TERM": "xterm", "COLUMNS": "200", "ROTA_TOKEN": token}
            words = ["run", "--server", str(http.base_url).rstrip("/"), *more, "--gpus", "4", "--", "true"]

            def waits(text: str) -> bool:
                return live and "free" in text

            seen = asyncio.create_task(asyncio.to_thread(on_terminal, words, os.environ | env, at=waits))
            if not live:
                while (await http.get("/api/v1/jobs/true-1")).status_code == 404:
                    await asyncio.sleep(0.05)
                await service.until("true-1", JobState.QUEUED)
                await asyncio.sleep(1)
                await service.http.post("/api/v1/jobs/true-1:stop")
            text = await asyncio.wait_for(seen, 60)
            assert ("detached" in text, ERASE in text) == (live, live), text
            assert not live or re.search(r"true-1 QUEUED \d.* · Needs 4 .*free", text), text

    with_service(tmp_path, test)
