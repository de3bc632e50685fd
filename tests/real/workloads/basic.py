"""Small workloads of the real tests: a stateless role and loops over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import rota


class Doubler(rota.Workload):
    """Stateless; the files ``raise-once`` and ``raise-always`` in the output folder make it raise."""

    def setup(self, ctx) -> None:
        self.ctx = ctx

    @rota.op(send=rota.Each)
    def double(self, item: int) -> dict[str, int]:
        if "torch" in sys.modules:
            raise AssertionError("an instance imports torch only if its workload does")
        if (self.ctx.output_dir / "raise-always").exists():
            raise RuntimeError(f"planned failure on item {item}")
        with contextlib.suppress(FileNotFoundError):
            (self.ctx.output_dir / "raise-once").unlink()  # one of the instances gets it
            raise RuntimeError(f"planned failure on item {item}")
        return {"value": item * 2, "pid": os.getpid()}

    @rota.op(retry="never")
    def once(self) -> str:
        raise ValueError("once is enough")

    @rota.op
    def holds(self, what: object) -> object:
        return {"what": what, "lock": threading.Lock()}

    @rota.op
    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @rota.op(retry="never")
    def lazily(self) -> object:
        return (number for number in range(3))


class Healing(rota.Workload):
    """Its setup waits while the file ``dead`` exists and ``healed`` does not."""

    def setup(self, ctx) -> None:
        while (ctx.output_dir / "dead").exists() and not (ctx.output_dir / "healed").exists():
            time.sleep(0.05)

    @rota.op(deadline="2s")
    def quick(self) -> str:
        return "here"


class NeverReady(rota.Workload):
    """Fails in setup while its trap exists."""

    def setup(self, ctx) -> None:
        raise RuntimeError("setup is broken")

    @rota.op
    def ping(self) -> str:
        return "pong"


def steps() -> int:
    return int(os.environ.get("STEPS", "5"))


async def doubling(f) -> None:
    """Doubles numbers and commits; waits for the file ``go`` after each commit named in ``PAUSE_AT``."""
    pause_at = int(os.environ.get("PAUSE_AT", "-1"))
    for n in range(f.committed + 1, steps() + 1):
        out = await f.roles.doubler.double(list(range(8)))
        assert [each["value"] for each in out] == [2 * i for i in range(8)], out
        await f.commit({"sum": sum(each["value"] for each in out), "pids": sorted({each["pid"] for each in out})})
        while n == pause_at and not (f.output_dir / "go").exists():
            await asyncio.sleep(0.02)
            await f.roles.doubler.double([1, 2, 3, 4])


async def catching(f) -> None:
    """A never operation raises to the loop, which goes on."""
    try:
        await f.roles.doubler.once()
    except rota_errors().CallFailed as error:
        await f.commit({"code": error.code, "role": error.fields["role"], "has_trace": "once is enough" in str(error)})


async def sending(f) -> None:
    """What cannot travel is an error of the call, and calls that nothing awaits are named at the end."""
    calls = {
        "arguments": lambda: f.roles.doubler.holds({"rows": [1, threading.Lock()]}),
        "result": lambda: f.roles.doubler.holds(1),
        "generator": f.roles.doubler.lazily,
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = await call()
        except rota_errors().RotaError as error:
            found[name] = f"{error.code}: {error.message}"
    f.roles.doubler.once()
    await f.commit(found)


async def choosing(f) -> None:
    """Calls one instance after the other, then all at once, and takes the answers as they come."""
    pids = [(await f.roles.doubler[rank].double(3))["pid"] for rank in range(3)]
    waiting = {asyncio.ensure_future(f.roles.doubler[rank].nap(rank / 4)) for rank in (2, 1, 0)}
    order = []
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        order += [one.result() for one in done]
    try:
        await f.roles.doubler[7].double(1)
    except rota_errors().BadInput as error:
        await f.commit({"pids": len(set(pids)), "order": order, "error": error.message})


async def asking_the_dead(f) -> None:
    """Calls a role that never becomes ready again and measures the wait."""
    while not (f.output_dir / "ask").exists():
        await asyncio.sleep(0.02)
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    try:
        await f.roles.healing.quick()
        found = {"raised": ""}
    except rota_errors().RoleDown as error:
        found = {"raised": error.code, "cause": error.fields["cause"], "role": error.fields["role"]}
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    found |= {"seconds": time.monotonic() - began, "cpu_s": cpu_s}
    (f.output_dir / "found.json").write_text(json.dumps(found))
    (f.output_dir / "healed").write_text("")


def imports(ctx) -> None:
    import rota_bark  # of the packages of its role
    import rota_leaf

    (ctx.output_dir / "imported.txt").write_text(f"{rota_leaf.VERSION} {rota_bark.VERSION}")


def plain(ctx) -> None:
    """A plain function workload."""
    Path(ctx.output_dir / "plain.txt").write_text(f"{ctx.role} {ctx.rank} {ctx.job} {ctx.node} {ctx.address}")


def rota_errors():
    import rota.spec.errors

    return rota.spec.errors


class Sleepy(rota.Workload):
    """Hangs once if the file ``hang`` exists; rests with notice, and reports progress in small steps."""

    def setup(self, ctx) -> None:
        self.ctx = ctx

    @rota.op
    def stuck_here(self) -> int:
        trap = self.ctx.output_dir / "hang"
        if trap.exists():
            trap.unlink()
            time.sleep(1000)
        return os.getpid()

    @rota.op
    def rest(self) -> str:
        with self.ctx.quiet("rest", max_s=60):
            time.sleep(6)
        for step in range(30):
            time.sleep(0.2)
            self.ctx.progress(step)
        return "rested"


async def napping(f) -> None:
    """A declared rest, long work with progress, and an operation that hangs once."""
    rested = await f.roles.sleepy.rest()
    (f.output_dir / "hang").touch()
    pid = await f.roles.sleepy.stuck_here()
    await f.commit({"rested": rested, "pid": pid})


def leaks(ctx) -> None:
    """Tell a secret in every way there is: a file of its own, output, a child's output, an exception."""
    value = os.environ["API_KEY"]
    Path(os.environ["ROTA_OUTPUT_DIR"], "used").write_text(value)
    print(f"the key is {value}, once more {value}", flush=True)
    subprocess.run(["/bin/sh", "-c", "echo child knows $API_KEY >&2"], check=True)
    raise ValueError(f"cannot log in with {value}")
