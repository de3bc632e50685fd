"""A call server for tests: ``python -m tests.runtime.call_server NAME [HOST KEY]`` prints its address and serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from typing import Any

from rota.runtime.socket_calls import CallServer

cancelled = list[object]()
"""What callers gave up; ``cancelled`` asks for it."""


async def answer(asked: tuple[str, Any]) -> object:
    """What a call gets, by its first item."""
    what, value = asked
    match what:
        case "echo":
            return value
        case "write":
            value[0] = 7.0
            return float(value[0]), bool(value.flags.writeable), value.__array_interface__["data"][0] % 16
        case "later":
            await asyncio.sleep(value)
            return value
        case "wait":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(value)
                raise
        case "cancelled":
            return list(cancelled)
        case "lock":
            return threading.Lock()
        case "fork":
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            return child
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise AssertionError(what)
    return None


async def main(name: str, host: str = "", key: str = "") -> None:
    """Serve for ever."""
    server = CallServer(answer)
    server.open(name)
    print(server.open_tcp(name, host, bytes.fromhex(key)) if host else "up", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
