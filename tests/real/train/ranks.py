"""Ranks of a test: processes forked from one server that has torch loaded, so that a group costs a blink."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

PRELOAD = ["torch._dynamo", "rota.train.apply", "rota.train.shm", "transformers.models.llama.modeling_llama"]
"""The compiler of torch, which every optimiser imports, is half of it; models of transformers take as long as torch."""
WAIT_S, LONG_S = 180.0, 850.0
"""For one thing, and for many one after the other."""


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


def _settings() -> dict[str, str]:
    """The settings of Rota in this process."""
    return {name: value for name, value in os.environ.items() if name.startswith("ROTA_")}


def _enter(
    function: Callable[..., Any], rank: int, size: int, port: int, env: dict[str, str], pipe: Connection, args: Any
):
    import torch

    for name in _settings():  # those that the server was started with, by whichever test came first
        del os.environ[name]
    os.environ.update(env)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        answer = function(rank, size, *args)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)
    pipe.send((True, answer))
    dist.destroy_process_group()


class Ranks:
    """``size`` processes in one Gloo group that run ``function(rank, size, *args)``; functions live in test modules."""

    def __init__(self, function: Callable[..., Any], size: int, *args: Any, home: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            env = {**_settings(), "ROTA_HOME": str(home), "ROTA_TENSORS_SEALED": "1"}
            given = (function, rank, size, self._store.port, env, theirs, args)
            process = context.Process(target=_enter, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def results(self, *ranks: int, limit_s: float = WAIT_S) -> list[Any]:
        """What the given ranks (all) returned. Raises RankFailed with the first traceback."""
        chosen = ranks or tuple(range(len(self._pipes)))
        found: dict[int, Any] = {}
        deadline = time.monotonic() + limit_s
        try:
            while len(found) < len(chosen):
                waiting = {self._pipes[rank]: rank for rank in chosen if rank not in found}
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RankFailed(f"ranks {sorted(waiting.values())} gave nothing within {limit_s} s")
                for pipe in ready:
                    good, found[waiting[pipe]] = pipe.recv()
                    if not good:
                        raise RankFailed(found[waiting[pipe]])
        finally:
            self.end(clean=len(found) == len(chosen))
        return [found[rank] for rank in chosen]

    def kill(self, rank: int) -> None:
        """SIGKILL one rank and wait for its end."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join(10)

    def end(self, *, clean: bool = True) -> None:
        """No process is left."""
        for process in self.processes:
            process.join(10 if clean else 0)
            if process.is_alive():
                process.kill()
                process.join(10)


def run_ranks(function: Callable[..., Any], size: int, *args: Any, home: Path, limit_s: float = WAIT_S) -> list[Any]:
    """Start the ranks and return what each gave."""
    return Ranks(function, size, *args, home=home).results(limit_s=limit_s)
