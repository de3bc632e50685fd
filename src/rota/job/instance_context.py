"""What user code sees in an instance: its place in the job, its folders, its restored state, its process group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rota.job.probes import QUIET_MAX_S, Pulse
from rota.runtime.clock import SystemClock


@dataclass(kw_only=True)
class InstanceContext:
    """Given to ``setup(ctx)`` of a workload and to a plain function workload.

    ``mesh`` maps axis to size, ``coords`` axis to this instance's place on it. ``restored`` is what ``@op.state``
    returned at commit ``committed``, None at the start of a job. ``devices`` are the device indices it may use,
    ``seed`` that of the job. Folders exist; ``work_dir`` is this instance's own, the others belong to the job.
    """

    job: str
    role: str
    rank: int
    world_size: int
    mesh: Mapping[str, int]
    coords: Mapping[str, int]
    epoch: int
    committed: int
    seed: int
    devices: tuple[int, ...]
    env: Mapping[str, str]
    output_dir: Path
    work_dir: Path
    checkpoint_dir: Path
    restored: Any = None
    pulse: Pulse = field(default_factory=lambda: Pulse(SystemClock()), repr=False)
    make_group: Callable[[], Any] | None = field(default=None, repr=False)

    def process_group(self) -> Any:
        """Initialise ``torch.distributed`` for the mesh of this instance and return the default group.

        Gloo, with NCCL for tensors on CUDA devices where torch sees such devices. The rendezvous belongs to this epoch:
        after a recovery every member makes a new one. Calling it again returns the same group. Raises RuntimeError
        outside an instance.
        """
        if self.make_group is None:
            raise RuntimeError("process_group() needs an instance that runs in a job")
        return self.make_group()

    def progress(self, n: float | None = None, unit: str = "steps") -> None:
        """Mark progress, ``n`` being how far it is; limits on silence count from here."""
        self.pulse.mark(n, unit)

    def quiet(self, why: str, max_s: float = QUIET_MAX_S) -> AbstractContextManager[None]:
        """Declare a legal silence: ``with ctx.quiet("checkpoint", max_s=600):``."""
        return self.pulse.quiet(why, max_s)

    def waiting(self, target: str, what: str = "") -> AbstractContextManager[None]:
        """Say that this code waits for ``target`` (``role/rank``, or any name) over a channel of its own.

        ``with ctx.waiting("rollout/0", "my socket"):`` makes the wait an edge of the graph that ``rota why`` shows.
        """
        return self.pulse.waiting.on(target, "declared", what)

    def log(self, message: str) -> None:
        """One line in the log of this instance; the log adds the time."""
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()
