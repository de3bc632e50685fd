"""Terminals beside an instance: real programs on real pseudo-terminals, in one event loop."""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rota.runtime import process, terminal
from rota.runtime.clock import SystemClock
from rota.runtime.terminal import BEHIND_BYTES_MAX, KEPT_BYTES, Terminals

pytestmark = pytest.mark.timeout(120)
ENV = {"PATH": os.environ["PATH"], "TERM": "xterm", "PS1": "> "}


class Reader:
    """Who is at a terminal: reads all, types by offset."""

    def __init__(self, all_of_them: Terminals, name: str = "t", user: str = "ann") -> None:
        self.terminals, self.name, self.user = all_of_them, name, user
        self.text, self.end, self.offset, self.status = "", 0, 0, None

    async def open(self, *argv: str, size: tuple[int, int] = (24, 80)) -> str:
        return await self.terminals.start(self.name, self.user, argv, ENV, size)

    async def read(self, wait_s: float = 1.0) -> int:
        found = await self.terminals.read(self.name, self.user, self.end, wait_s)
        assert found is not None
        data = base64.b64decode(found["data"])
        self.text, self.end = self.text + data.decode(errors="replace"), found["end"]
        self.status = found["exit_status"] if not data else self.status
        return len(data)

    async def until(self, pattern: str) -> str:
        try:
            async with asyncio.timeout(30):
                while not re.search(pattern, self.text):
                    await self.read()
        except TimeoutError:
            raise AssertionError(f"no {pattern!r} in {self.text!r}") from None
        return self.text

    async def ended(self) -> int:
        async with asyncio.timeout(30):
            while self.status is None:
                await self.read()
        return self.status

    def type(self, text: str, **more: Any) -> Any:
        found = self.terminals.write(
            self.name,
            self.user,
            more.get("offset", self.offset),
            text.encode(),
            more.get("size"),
            more.get("leave", False),
        )
        assert found is not None
        self.offset = found["taken"]
        return found


def with_terminals(test: Callable[[Terminals], Awaitable[None]]) -> None:
    async def run() -> None:
        made = Terminals(SystemClock())
        try:
            await test(made)
        finally:
            await made.close()

    asyncio.run(run())


def test_a_program_has_a_terminal_of_its_own_with_size_signals_and_an_exit_status() -> None:
    async def test(terminals: Terminals) -> None:
        one = Reader(terminals)
        assert await one.open("sh", size=(30, 100)) == ""
        one.type("stty size; ps -o tty= -p $$; trap 'echo resized' WINCH\n")
        await one.until(r"30 100\r\n.*pts/\d+")
        one.type("", size=(50, 132))
        one.type("sh -c 'stty size; exec sleep 600'\n")
        await one.until(r"50 132")
        one.type("\x03")
        await one.until(r"\^C\s+> $")
        one.type("echo after-$((4+4)); exit 7\n")
        await one.until(r"after-8")
        assert await one.ended() == 7
        assert one.type("x")["over"]

    with_terminals(test)


def test_what_is_sent_again_is_taken_once_and_what_is_read_again_is_the_same() -> None:
    async def test(terminals: Terminals) -> None:
        one = Reader(terminals)
        await one.open("sh")
        await one.until("> $")
        one.type("echo a-$((1+1))\n")
        length = one.offset
        one.type("echo a-$((1+1))\necho b\n", offset=0)  # the reply was lost: sent again, with what came since
        assert one.offset == length + len("echo b\n")
        one.type("zzz", offset=one.offset + 5)  # what was never taken before it: none of it
        await one.until(r"(?:\n|> )b\r\n> $")
        assert len(re.findall(r"\na-2\r", one.text)) == 1 and "zzz" not in one.text
        again = Reader(terminals)
        await again.until(r"(?:\n|> )b\r\n> $")
        assert again.text == one.text

    with_terminals(test)


def test_a_program_waits_while_nobody_reads_and_nothing_of_its_last_output_is_lost() -> None:
    async def test(terminals: Terminals) -> None:
        one = Reader(terminals)
        count = 3 * KEPT_BYTES
        await one.open("sh", "-c", f"stty -opost; head -c {count} /dev/zero | tr '\\0' x; exit 3")
        await asyncio.sleep(1.0)
        held = terminals._open["t"]
        assert held.end <= BEHIND_BYTES_MAX + terminal.CHUNK_BYTES, "it does not fill the memory of the instance"
        assert await one.ended() == 3
        assert one.text.count("x") == count and len(held.kept) <= KEPT_BYTES + terminal.CHUNK_BYTES

    with_terminals(test)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_terminal_of_which_nobody_hears_is_hung_up_with_its_program(
    monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.setattr(terminal, "AWAY_S", 1.5)
    monkeypatch.setattr(terminal, "SILENT_S", 1.5 if stubborn else 600.0)
    monkeypatch.setattr(terminal, "LOOK_S", 0.1)
    monkeypatch.setattr(terminal, "HANGUP_S", 1.0)

    async def test(terminals: Terminals) -> None:
        one = Reader(terminals)
        await one.open("sh", "-c", "trap '' HUP; echo on; sleep 600; sleep 600" if stubborn else "echo on; sleep 600")
        await one.until("on")
        which = terminals._open["t"].which
        assert which is not None
        for _ in range(5):
            await asyncio.sleep(0.5)
            one.type("")  # a sign of life
        assert process.is_alive(which)
        if not stubborn:  # nobody reads either; else who reads only is left too, in the end
            assert await asyncio.to_thread(process.wait_gone, (which,), 20) == ()
        assert await one.ended() in (128 + 1, 128 + 9, 128 + 15)
        assert not process.is_alive(which)

    with_terminals(test)


def test_a_terminal_is_its_users_alone_and_there_are_not_many() -> None:
    async def test(terminals: Terminals) -> None:
        one = Reader(terminals)
        await one.open("cat")
        assert await terminals.read("t", "ben", 0, 0.1) is None
        assert terminals.write("t", "ben", 0, b"x", None, False) is None
        assert await terminals.read("none", "ann", 0, 0.1) is None
        for number in range(terminal.TERMINALS_MAX - 1):
            assert await Reader(terminals, f"t{number}").open("cat") == ""
        assert "terminals are open beside this instance" in await Reader(terminals, "more").open("cat")
        one.type("there\n")
        await one.until("there\r\nthere")
        one.type("", leave=True)
        assert await one.ended() == 128 + 1
        missing = Reader(terminals, "missing")
        assert await missing.open("no-such-program") == ""
        assert await missing.ended() == 127 and "no-such-program: No such file" in missing.text

    with_terminals(test)


async def ended_program(reader: Reader, then: str = "") -> None:
    """Open a terminal and wait until its program has ended; its output and its end are not read."""
    await reader.open("sh", "-c", f"echo pid=$$.; {then}")
    which = process.identify(int((await reader.until(r"pid=(\d+)\.")).partition("=")[2].partition(".")[0]))
    while which is not None and process.is_alive(which):
        await asyncio.sleep(0.01)


async def seconds(work: Awaitable[None]) -> float:
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(work, 20)
    return asyncio.get_running_loop().time() - began


def test_the_end_of_an_instance_waits_until_the_end_of_a_program_was_read() -> None:
    async def body(terminals: Terminals) -> None:
        await terminals.wait_ends_read(30)  # without a terminal there is nothing to wait for
        running, reader = Reader(terminals, "runs"), Reader(terminals)
        await running.open("sh", "-c", "read x")
        assert await seconds(terminals.wait_ends_read(30)) < 10  # the instance may take the program with it
        await ended_program(reader, "exit 3")
        waits = asyncio.create_task(terminals.wait_ends_read(30))
        await asyncio.sleep(0.3)
        assert not waits.done()
        assert await reader.ended() == 3
        await asyncio.wait_for(waits, 10)

    with_terminals(body)


def test_the_end_of_an_instance_does_not_wait_for_who_has_left_and_not_long_for_who_reads_no_more() -> None:
    async def body(terminals: Terminals) -> None:
        left, away = Reader(terminals, "left"), Reader(terminals, "away")
        await ended_program(left, "echo unread")
        left.type("", leave=True)
        await left.read()  # one that was under way
        assert await seconds(terminals.wait_ends_read(30)) < 10
        await ended_program(away)
        assert 0.4 <= await seconds(terminals.wait_ends_read(1.0)) < 10
        assert await seconds(terminals.wait_ends_read(1.0)) < 0.4  # from the end of the program on

    with_terminals(body)
