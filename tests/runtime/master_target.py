"""A master for tests: answers calls from its constructor on, with a loop of its own in a thread."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rota.runtime.launcher import Call, Handle
from rota.runtime.ray.launcher import RayLauncher
from rota.spec.ids import Epoch, InstanceId, JobId, NodeId, RoleName


class CountingMaster:
    """Counts its starts in a file and its turns in memory."""

    def __init__(self, folder: str) -> None:
        self.starts = Path(folder) / "starts"
        with self.starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
        fragile = Path(folder) / "fail-once"
        if fragile.exists():
            fragile.unlink()
            raise OSError("a store that is away for a moment")
        self.turns = 0
        self.launcher = RayLauncher.here()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self.turns += 1
            time.sleep(0.01)

    async def status(self) -> dict[str, Any]:
        lines = self.starts.read_text().splitlines()
        return {"pid": os.getpid(), "starts": len(lines), "turns": self.turns, "torch": "torch" in sys.modules}

    async def nap(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"


class Caller:
    """An instance that calls its master and another instance."""

    def __init__(self) -> None:
        self.launcher = RayLauncher.here()

    async def ask(self, name: str, method: str, timeout_s: float) -> Any:
        who = InstanceId(RoleName("any"), 0)
        to = Handle(name=name, job=JobId(""), instance=who, epoch=Epoch(0), node=NodeId(""), pid=0)
        return await self.launcher.call(to, Call(method=method, timeout_s=timeout_s))
