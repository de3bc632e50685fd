"""Calls of every retry class, for callees that are killed: each is noted where it runs and where it ends."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path
from typing import Any

import rota
from rota.spec.errors import RotaError

KINDS = ("safe", "never", "change")
AT_ONCE = 24
COMMIT_EVERY = 150


class Killed(rota.Workload):
    """Notes each call that runs in it."""

    def setup(self, ctx: Any) -> None:
        self.notes: Path = ctx.output_dir / f"ran-{os.getpid()}"
        self.changes = 0

    def _note(self, kind: str, key: str) -> str:
        with self.notes.open("a") as file:
            file.write(f"{kind} {key}\n")
        return key

    @rota.op(send=rota.Each)
    def safe(self, key: str) -> str:
        """May run again."""
        return self._note("safe", key)

    @rota.op(send=rota.Each, retry="never")
    def never(self, key: str) -> str:
        """Runs once or not at all."""
        return self._note("never", key)

    @rota.op(send=rota.Each, retry="commit")
    def change(self, key: str) -> str:
        """Changes the state, which goes back with the loop when a call is lost."""
        self.changes += 1
        return self._note("change", key)

    @rota.op.state
    def state(self) -> dict[str, Any]:
        """How often it changed."""
        import numpy as np

        return {"changes": np.array([self.changes])}


async def many(f: Any) -> None:
    """Calls until CALLS have ended and the file ``enough`` is there; how each ended is a line of ``ended``."""
    out, wanted = f.output_dir, int(os.environ["CALLS"])
    path = out / "ended"
    ended = sum(1 for _ in path.open()) if path.exists() else 0
    with path.open("a", buffering=1) as notes:

        async def one(number: int) -> None:
            nonlocal ended
            kind, key = KINDS[number % len(KINDS)], uuid.uuid4().hex
            how = "Cancelled"
            try:
                (found,) = await getattr(f.roles.killed, kind)([key])
                how = "value" if found == key else f"wrong:{found}"
            except RotaError as error:
                how = type(error).__name__
            finally:
                notes.write(f"{kind} {key} {how}\n")
                ended += 1

        while ended < wanted or not (out / "enough").exists():
            for _ in range(COMMIT_EVERY // AT_ONCE):
                await asyncio.gather(*(one(number) for number in range(AT_ONCE)))
            await f.commit()
