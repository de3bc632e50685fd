"""Terminals over the API: real programs on real terminals, an engine that the test plays."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from standing import Standing, listening, with_service

from rota.service.aclient import AsyncClient
from rota.service.cli.verbs import terminal as verb
from rota.service.process.tasks import look_for_idle
from rota.spec.errors import BadInput, Conflict, NotAllowed, UnknownName
from rota.spec.states import JobState

pytestmark = pytest.mark.timeout(180)


async def opened(service: Standing) -> AsyncClient:
    """A client of the service, whose job ``hello-1`` runs."""
    await service.submit()
    await service.until("hello-1", JobState.ADMITTED)
    await service.until_asked("hello-1")
    token = service.http.headers["authorization"].split()[1]
    return AsyncClient("http://127.0.0.1:7700", token, transport=service.http._transport)


async def read(client: AsyncClient, terminal: str) -> tuple[str, Any]:
    """All output of a terminal and how its program ended."""
    text = b""
    async for one in client.terminal_output("hello-1", terminal):
        if one.ended:
            return text.decode(), one
        text += one.data
    raise AssertionError(f"no end after {text!r}")


def test_a_terminal_gives_output_and_status_and_the_audit_its_opening_alone(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        client = await opened(service)
        made = await client.open_terminal("hello-1", "main/0", ["sh"], term="xterm", rows=30, columns=99)
        assert (made["kind"], made["instance"]) == ("Terminal", "main/0")
        keys = b"stty size; echo $TERM; exit 5\n"
        done = await client.type_into("hello-1", made["terminal"], keys)
        assert (done["taken"], done["over"]) == (len(keys), False)
        text, end = await read(client, made["terminal"])
        assert "30 99\r\nxterm\r\n" in text and (end.exit_status, end.text) == (5, "")
        again, _ = await read(client, made["terminal"])
        assert again == text
        lines = [one for one in service.app.audit.newest(100) if "terminal" in str(one["path"])]
        assert [(one["path"], one["command"], one["status"]) for one in lines] == [
            ("/api/v1/jobs/hello-1:terminal", "sh", 201)
        ]

    with_service(tmp_path, test)


def test_a_program_that_closes_its_terminal_ends_as_it_says_and_may_open_it_again(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        client = await opened(service)
        for last, text, status in (("exit 7", "", 7), ("echo back >/dev/tty; exit 0", "back\r\n", 0)):
            argv = ["sh", "-c", f"exec 0<&- 1>&- 2>&-; sleep 0.3; {last}"]
            made = await client.open_terminal("hello-1", argv=argv)
            seen, end = await read(client, made["terminal"])
            assert (seen, end.exit_status) == (text, status)

    with_service(tmp_path, test)


def test_a_terminal_is_refused_to_others_and_where_nothing_runs_with_the_reason(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        client = await opened(service)
        made = await client.open_terminal("hello-1", argv=["cat"])
        assert (
            await service.http.put("/api/v1/users/eve", json={"grants": [{"queue": "", "role": "queue-admin"}]})
        ).is_success
        token = (await service.http.post("/api/v1/tokens", json={"user": "eve"})).json()["token"]
        eve = AsyncClient("http://127.0.0.1:7700", token, transport=service.http._transport)
        with pytest.raises(UnknownName, match="is not open"):  # she may open one of her own
            await eve.type_into("hello-1", made["terminal"], b"x")
        service.app.vault.put("local", "KEY", "correct-horse")
        await service.submit("name: uses\nsecrets: [KEY]\nroles: {main: {run: [echo, hi]}}\n")
        with pytest.raises(NotAllowed, match="has secrets of local"):
            await eve.open_terminal("uses-1")
        for terminal in ("nope", "main.0.1.none", "main.x.1.none", "." * 300):
            with pytest.raises(UnknownName, match="is not open"):
                await client.type_into("hello-1", terminal)
        wrong = await service.http.post(f"/api/v1/jobs/hello-1/terminals/{made['terminal']}", json={"data": "%"})
        assert (wrong.status_code, wrong.json()["detail"]) == (422, "data: not base64")
        with pytest.raises(UnknownName, match="no role 'x'"):
            await client.open_terminal("hello-1", "x/0")
        service.engine.alive.clear()
        with pytest.raises(Conflict, match="main/0 of hello-1 does not run"):
            await client.open_terminal("hello-1")
        _, end = await read(client, made["terminal"])
        assert (end.exit_status, "gone" in end.text) == (None, True)

    with_service(tmp_path, test)


def test_typing_counts_as_use_of_a_job_with_an_idle_limit(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        client = await opened(service)
        await service.play_start("hello-1", "main/0")
        made = await client.open_terminal("hello-1", argv=["cat"])
        used_s = service.app.used_s(service.app.loop.installation.find("hello-1").id)
        assert used_s > 0
        await asyncio.sleep(0.05)
        await client.type_into("hello-1", made["terminal"])
        job = service.app.loop.installation.find("hello-1").id
        assert service.app.used_s(job) == used_s, "a sign of life is no use"
        await client.type_into("hello-1", made["terminal"], b"x")
        assert service.app.used_s(job) > used_s
        await client.type_into("hello-1", made["terminal"], leave=True)
        await client.stop("hello-1", grace_s=0)
        await look_for_idle(service.app)
        assert service.app.used_s(job) > 0

    with_service(tmp_path, test)


@pytest.mark.slow
def test_the_command_types_what_comes_on_its_input_and_ends_as_the_program(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await opened(service)
        async with listening(service) as http:

            def command(*words: str, typed: str) -> subprocess.CompletedProcess[str]:
                server, token = str(http.base_url).rstrip("/"), http.headers["authorization"].split()[1]
                flags = ("--server", server, "--token", token)
                argv = [sys.executable, "-m", "rota", *flags, *words]
                return subprocess.run(argv, input=typed, capture_output=True, text=True, timeout=90, check=False)

            done = await asyncio.to_thread(command, "exec", "-it", "hello-1/main/0", "--", "cat", typed="one\ntwo\n")
            assert (done.returncode, sorted(done.stdout.split())) == (0, ["one", "one", "two", "two"]), done
            done = await asyncio.to_thread(command, "exec", "-it", "hello-1", typed="exit 9\n")
            assert done.returncode == 9, done
            late = "import sys, termios, time; time.sleep(1); termios.tcflush(0, termios.TCIFLUSH); sys.stdin.read()"
            argv = ("exec", "-it", "hello-1", "--", sys.executable, "-c", late)  # as a shell that sets its terminal up
            assert (await asyncio.to_thread(command, *argv, typed="")).returncode == 0, "it is told again of the end"
            done = await asyncio.to_thread(command, "exec", "hello-1", "--", "sh", "-c", "exit 6", typed="")
            assert done.returncode == 6, "beside the first instance, as with a terminal"
            for words, text in (
                (("exec", "-it", "hello-1", "-t", "5s", "--", "sh"), "--timeout 5s goes with a command without -it"),
                (("exec", "-it", "--json", "hello-1"), "--json goes with a command without -it"),
                (("exec", "hello-1/main/0", "main/0", "--", "true"), "hello-1/main/0 names an instance"),
                (("exec", "hello-1", "main/0"), "missing COMMAND"),
            ):
                wrong = await asyncio.to_thread(command, *words, typed="")
                assert wrong.returncode == 125 and text in wrong.stderr, wrong

    with_service(tmp_path, test)


def test_what_a_shell_is_as_a_job_and_what_does_not_go_with_it() -> None:
    made = json.loads(verb.shell_source({}))
    assert (made["name"], made["idle_limit"], made["roles"]["main"]["fail"]) == (
        "shell",
        "1h",
        {"limit": "0/10m", "then": []},
    )
    with pytest.raises(BadInput, match="-d does not go with --shell"):
        verb.shell_source({"-w": False, "-d": True})


def test_the_job_of_a_shell_lasts_as_long_as_what_its_terminal_wrote_down(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "ROTA_OUTPUT_DIR": str(tmp_path)}
    (tmp_path / ".shell").write_text("1")  # of an earlier attempt
    program = subprocess.Popen(["sleep", "600"])
    held = subprocess.Popen(json.loads(verb.shell_source({}))["roles"]["main"]["run"], env=env)
    try:
        while (tmp_path / ".shell").exists():
            time.sleep(0.02)
        (tmp_path / ".shell").write_text(f"{program.pid}\n")
        time.sleep(1.2)
        assert held.poll() is None
        program.kill()
        program.wait()
        assert held.wait(20) == 0 and not (tmp_path / ".shell").exists()
    finally:
        held.kill()
        program.kill()
