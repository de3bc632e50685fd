"""A job of roles that counts its commits, and what the log of a job says of its entries, commits and stops."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.machines.site import LIMIT_S, Site

CODE = """
import asyncio, os, socket

import numpy as np

import rota


class Counter(rota.Workload):
    \"\"\"Counts its updates; they are the state of a commit.\"\"\"

    def setup(self, ctx):
        kept = ctx.restored
        self.seen = np.array(kept["seen"]) if kept else np.zeros(1)
        assert int(self.seen[0]) == ctx.committed, f"{self.seen} at commit {ctx.committed}"

    @rota.op(retry="commit")
    def add(self, n):
        self.seen = self.seen + 1
        return int(self.seen[0])

    @rota.op.state
    def state(self):
        return {"seen": self.seen}


class Echo(rota.Workload):
    @rota.op
    def say(self, n):
        return n


async def counts(f):
    print(f"ENTER {f.committed} {socket.gethostname()}", flush=True)
    for n in range(f.committed + 1, 100_000):
        assert await f.roles.counter.add(n) == n
        if hasattr(f.roles, "echo"):
            assert await f.roles.echo.say(n) == n
        await asyncio.sleep(float(os.environ["STEP_S"]))
        await f.commit({"n": n})
"""


@dataclass
class Watched:
    """A job of a site, by what its log says."""

    site: Site
    id: str

    def document(self) -> dict[str, Any]:
        return self.site.json("show", self.id)

    @property
    def state(self) -> str:
        return str(self.document()["state"])

    @property
    def machine(self) -> str:
        """The one machine that it is on."""
        (found,) = {one["node"] for one in self.document()["instances"] if one["node"]}
        return str(found)

    @property
    def other(self) -> str:
        (found,) = {one.name for one in self.site.machines} - {self.machine}
        return found

    def events(self) -> list[dict[str, Any]]:
        return self.site.json("events", self.id)["items"]

    def commits(self) -> int:
        return int((self.document()["progress"] or {"commit": 0})["commit"])

    def entries(self) -> list[tuple[int, str]]:
        """The commit and the machine of each entry of the loop, in order."""
        found = re.findall(r"ENTER (\d+) (\w+)", self.site.rota("logs", self.id))
        return [(int(n), name) for n, name in found]

    def alternates(self) -> bool:
        """Whether it entered more than once, and each time on another machine than before."""
        machines = [name for _, name in self.entries()]
        return len(machines) > 1 and all(one != other for one, other in itertools.pairwise(machines))

    def worlds(self) -> list[str]:
        """The size of the world at each entry of a script."""
        return re.findall(r"ENTER \d+ \w+ (\d+)", self.site.rota("logs", self.id))

    def wait(self, look: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not look():
            assert time.monotonic() < deadline, (what, self.document(), self.events()[-20:])
            time.sleep(0.3)

    def goes_on(self, more: int = 3) -> None:
        """Wait until it runs and has made some more commits."""
        self.wait(lambda: self.state == "RUNNING", "it runs")
        after = self.commits() + more
        self.wait(lambda: self.commits() >= after, f"commit {after}")

    def end(self) -> None:
        """Stop it, and check what its log says of the whole of it."""
        self.site.rota("stop", self.id, "--yes", ok=False)
        self.site.ended(self.id)
        self.check()

    def end_script(self, stops: int) -> None:
        """Stop it; every entry of the script was at the step that it had saved, and it saved each time."""
        assert self.state == "RUNNING", self.events()[-20:]
        self.site.rota("stop", self.id, "--yes", ok=False)
        self.site.ended(self.id)
        words = re.findall(r"(ENTER|SAVED) (\d+)", self.site.rota("logs", self.id))
        assert [word for word, _ in words][: 2 * stops + 1] == ["ENTER", *["SAVED", "ENTER"] * stops], words
        at = [int(step) for _, step in words]
        assert at[0] == 0 and at[2 : 2 * stops + 1 : 2] == at[1 : 2 * stops : 2], words
        assert at == sorted(at) and len(set(at[1::2])) >= stops, words

    def check(self) -> None:
        """Every entry was at the last commit before it, and no commit was ever taken back."""
        last, stopped_at = 0, [0]
        for event in self.events():
            match event["kind"]:
                case "Committed":
                    assert event["n"] == last + 1, event
                    last = event["n"]
                case "RolledBack":
                    assert event["to_commit"] == event["from_commit"], event
                case "JobRequeued" | "FailoverStarted":
                    stopped_at.append(last)
                case _:
                    pass
        assert [n for n, _ in self.entries()] == stopped_at

    def losses(self) -> list[tuple[str, str]]:
        """What ended its instances."""
        return [(one["reason"], one["text"]) for one in self.events() if one["kind"] == "InstanceLost"]

    def check_faults(self) -> None:
        """Commits have one number each, and no rollback went below one that a peer or a disk had."""
        last, held = 0, 0
        for event in self.events():
            match event["kind"]:
                case "Committed":
                    assert event["n"] == last + 1, event
                    last = event["n"]
                case "CommitCopied" if event["copies"]:
                    held = max(held, event["n"])
                case "CheckpointSaved":
                    held = max(held, event["n"])
                case "RolledBack":
                    assert held <= event["to_commit"] <= event["from_commit"] <= last, (event, held, self.losses())
                    last = event["to_commit"]
                case _:
                    pass

    def processes(self) -> dict[str, list[str]]:
        """Its instances by machine, as the processes there say that write their logs: they end with all of them."""
        log = re.compile(rf"/jobs/{self.id}/logs/(\S+)-(\d+)\.log ")
        return {
            machine.name: sorted(
                f"{found[1]}/{found[2]}" for line in machine.processes().values() if (found := log.search(line))
            )
            for machine in self.site.machines
        }

    def places(self) -> dict[str, list[str]]:
        """Its instances by machine, as the service says."""
        found = {machine.name: list[str]() for machine in self.site.machines}
        for one in self.document()["instances"]:
            if one["node"]:
                found[one["node"]].append(one["instance"])
        return {name: sorted(rows) for name, rows in found.items()}
