"""What the conformance tests start in processes: a class that answers, waits, fails and writes as it is told."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path


class OwnError(Exception):
    """An exception whose constructor the caller cannot repeat."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class Subject:
    """Remembers what it was given; each method shows one thing a launcher must carry."""

    def __init__(self, greeting: str = "hello", fail: str = "") -> None:
        if fail:
            raise ValueError(fail)
        self.greeting = greeting
        self.stopped_file = os.environ.get("STOPPED_FILE", "")
        self.made_in_main_thread = threading.current_thread() is threading.main_thread()

    def greet(self, name: str, *, mark: str = "!") -> str:
        return f"{self.greeting} {name}{mark}"

    async def greet_later(self, name: str) -> str:
        await asyncio.sleep(0)
        return f"{self.greeting} {name}"

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def place(self) -> tuple[str, str]:
        return str(Path.cwd()), sys.path[0]

    def pid(self) -> int:
        return os.getpid()

    def block(self, seconds: float) -> str:
        """Hold a thread, as user code does that computes."""
        time.sleep(seconds)
        return "blocked"

    async def block_loop(self, seconds: float) -> str:
        """Hold the event loop of user calls, as careless user code does."""
        time.sleep(seconds)
        return "blocked"

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def fail_own(self) -> None:
        raise OwnError(1, 2)

    def write(self) -> None:
        print("from print")
        print("to stderr", file=sys.stderr)
        os.write(1, b"from the descriptor\n")
        os.system("echo from a child")

    def write_and_die(self, count: int) -> None:
        for number in range(count):
            print(f"line {number}")
        os.kill(os.getpid(), 9)

    def exit(self, status: int) -> None:
        os._exit(status)

    def start_child(self) -> int:
        """A process that outlives its parent unless somebody ends it."""
        return os.posix_spawn("/bin/sleep", ["sleep", "600"], {})

    def stop(self) -> None:
        if self.stopped_file:
            Path(self.stopped_file).write_text("asked to stop")
