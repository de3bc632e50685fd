"""Ask a child process what the workloads of a job declare, and complete the job with the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, replace
from typing import Any

from rota.job.core.check import check_graph
from rota.job.core.paths import with_default_loop
from rota.runtime import environ
from rota.spec import codec
from rota.spec.errors import BadInput
from rota.spec.job import Interface, JobSpec
from rota.spec.reasons import Reason

INSPECT_TIMEOUT_S = 120.0
OUTPUT_BYTES_MAX = 4 * 2**20
STDERR_SHOWN = 4000
IMPORT_HINT = "the module is imported to read what it declares: mend it, and leave work to its functions and methods"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A workload could not be imported or declares nonsense."""

    reason: Reason
    role: str
    text: str
    traceback: str = ""

    @property
    def error(self) -> BadInput:
        """The same for who asked, with what to do."""
        where = f"roles.{self.role}.workload: " if self.role else ""
        hint = IMPORT_HINT if self.reason is Reason.IMPORT_ERROR else ""
        return BadInput(f"{where}{self.text}", hint=hint, code=str(self.reason), traceback=self.traceback)


async def inspect_workloads(spec: JobSpec, workdir: str) -> JobSpec | Refused:
    """The spec with the interface of every role, or why it can never run. The child is gone when this returns."""
    wanted = {role.name: role.workload for role in spec.roles if role.workload and role.interface is None}
    if not wanted:
        return _checked(with_default_loop(spec))
    env = environ.snapshot() | dict(spec.env)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rota.job.inspect",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        limit=OUTPUT_BYTES_MAX,
    )
    request = json.dumps({"workdir": workdir, "workloads": wanted}).encode()
    try:
        out, err = await asyncio.wait_for(child.communicate(request), INSPECT_TIMEOUT_S)
    except TimeoutError:
        return Refused(reason=Reason.IMPORT_ERROR, role="", text=f"importing took more than {INSPECT_TIMEOUT_S:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode != 0 or not out:
        text = f"a module ended the process that imports it (status {child.returncode}); its last words follow"
        shown = err.decode(errors="replace")[-STDERR_SHOWN:]
        return Refused(reason=Reason.IMPORT_ERROR, role="", text=text, traceback=shown)
    return _completed(spec, json.loads(out))


def _completed(spec: JobSpec, found: dict[str, dict[str, Any]]) -> JobSpec | Refused:
    for role, answer in found.items():
        if "error" in answer:
            return Refused(
                reason=Reason.IMPORT_ERROR, role=role, text=answer["error"], traceback=answer.get("traceback", "")
            )
    interfaces = {role: codec.from_json_value(Interface, answer["interface"]) for role, answer in found.items()}
    roles = tuple(replace(role, interface=interfaces.get(role.name, role.interface)) for role in spec.roles)
    return _checked(with_default_loop(replace(spec, roles=roles)))


def _checked(spec: JobSpec) -> JobSpec | Refused:
    """Refuse a graph that cannot work: now that the interfaces are known, operations, axes and state can be checked."""
    problems = check_graph(spec)
    if not problems:
        return spec
    return Refused(reason=Reason.INVALID, role="", text="\n".join(str(problem) for problem in problems))
