"""Shell scripts as jobs: leading ``#ROTA key=value`` lines and a subset of ``#SBATCH`` become a job of one role.

The script itself runs unchanged, under the torchrun contract when it asks for more than one task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from rota.service.jobfile.problems import ErrorCollector, TextPlace
from rota.spec.errors import did_you_mean

HEADER_LINES_MAX = 200
SHORT = {
    "cpus": "roles.main.resources.cpus",
    "gpus": "roles.main.resources.gpus",
    "gpu_type": "roles.main.resources.gpu_type",
    "memory": "roles.main.resources.memory",
    "replicas": "roles.main.mesh.dp",
}
"""Words of ``#ROTA`` for the only role; any other key is a path as in ``--set``."""
REPLACED = {
    "output": "Rota keeps the output: rota logs JOB",
    "error": "Rota keeps the output: rota logs JOB",
    "array": "one job for each value: rota run --sweep task=1..10",
    "export": "write env: into a job file",
    "mail-user": "add a webhook for notices of jobs: rota webhook add URL",
    "mail-type": "add a webhook for notices of jobs: rota webhook add URL",
    "account": "queues take the place of accounts: rota run -q QUEUE, or #SBATCH --partition=QUEUE",
    "mem-per-cpu": "give the memory of one task: #SBATCH --mem=16G",
    "mem-per-gpu": "give the memory of one task: #SBATCH --mem=16G",
    "exclusive": "ask for all devices of a node instead",
    "constraint": "ask for the type with the devices: --gres=gpu:A100:1; no other feature of a node is asked for",
    "nodelist": "ask for resources, not for nodes by name",
}
_SHORT_OPTIONS = {
    "J": "job-name", "p": "partition", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time",
    "C": "constraint", "o": "output", "e": "error", "a": "array", "d": "dependency", "A": "account", "w": "nodelist",
}  # fmt: skip
_CLOCK = re.compile(r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One option of a script's head: its name, its value and its place."""

    name: str
    value: str
    line: int
    col: int


class ScriptBody(TypedDict):
    """The body of a submission that a script becomes."""

    source: str
    filename: str
    sets: list[str]
    workdir: str


def script_body(text: str, *, filename: str, workdir: str) -> ScriptBody:
    """The body of a submission for a script. Raises JobFileError with every option that has no meaning here."""
    errors = ErrorCollector(text, filename)
    interpreter = "python" if filename.endswith(".py") else "bash"
    role = {"run": [interpreter, Path(filename).name]}
    source = {"name": job_name(filename), "roles": {"main": role}}
    sets = [*_places(text, errors)]
    _refuse_srun(text, errors)
    errors.raise_if_any()
    return {"source": json.dumps(source, indent=1), "filename": filename, "sets": sets, "workdir": workdir}


def job_name(path: str) -> str:
    """The name of a job that runs a file: its stem with what no name may hold made a dash."""
    stem = Path(path).stem[:40] or "command"
    name = "".join(char if char.isascii() and (char.isalnum() or char in "_.-") else "-" for char in stem)
    return name if name[0].isalpha() else f"run-{name}"


def header_places(text: str) -> dict[str, tuple[int, int]]:
    """Line and column of the option behind each of the ``sets`` of ``script_body``."""
    return _places(text, ErrorCollector(text, ""))


def _places(text: str, errors: ErrorCollector) -> dict[str, tuple[int, int]]:
    sets: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(text.splitlines()[:HEADER_LINES_MAX], 1):
        if line.startswith("#ROTA "):
            sets |= dict.fromkeys(_rota(line[6:], number, errors), (number, 7))
        elif line.startswith("#SBATCH "):
            for header in _options(line[8:].partition(" #")[0], number):
                sets |= dict.fromkeys(_sbatch(header, errors), (number, header.col))
        elif line.strip() and not line.startswith("#"):
            break
    return sets


def _refuse_srun(text: str, errors: ErrorCollector) -> None:
    """A script that starts its own tasks would start them once a task."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*srun\b", line)
        if found is not None:
            hint = "every task runs the script itself: write the command without srun"
            errors.add(
                TextPlace(number, found.end() - 3), (), "srun has no meaning here", hint=hint, code="UNKNOWN_FIELD"
            )


def _rota(text: str, line: int, errors: ErrorCollector) -> list[str]:
    path, equals, value = text.strip().partition("=")
    if not equals or not path:
        errors.add(
            TextPlace(line, 7),
            (),
            f"{text.strip()!r} is not key=value",
            hint="for example #ROTA gpus=2",
            code="BAD_SET",
        )
        return []
    return [f"{SHORT.get(path, path)}={value.strip()}"]


def _options(text: str, line: int) -> list[Header]:
    """``-J name``, ``-Jname``, ``--job-name=name``, ``--job-name name`` of one line."""
    found: list[Header] = []
    words = [(part.group(), part.start() + 9) for part in re.finditer(r"\S+", text)]
    while words:
        word, col = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--") and word.startswith("-") and name:
            name, value = _SHORT_OPTIONS.get(name[0], name[0]), name[1:] + (f"={value}" if equals else "")
            equals = value
        if not equals and words and not words[0][0].startswith("-"):
            value = words.pop(0)[0]
        found.append(Header(name=name, value=value, line=line, col=col))
    return found


def _sbatch(header: Header, errors: ErrorCollector) -> list[str]:
    known = SBATCH.get(header.name)
    if known is None:
        hint = REPLACED.get(header.name) or did_you_mean(header.name, SBATCH)
        errors.add(
            TextPlace(header.line, header.col),
            (),
            f"--{header.name} has no meaning here",
            hint=hint,
            code="UNKNOWN_FIELD",
        )
        return []
    try:
        return known(header.value)
    except ValueError as exc:
        errors.add(TextPlace(header.line, header.col), (f"--{header.name}",), str(exc), code="BAD_TYPE")
        return []


def _time(text: str) -> list[str]:
    """Slurm's ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours[:minutes[:seconds]]``."""
    found = _CLOCK.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a time such as 90, 1:30:00 or 1-12")
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        units = (3600, 60, 1)
    else:
        units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(numbers)]
    seconds = 86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))
    return [f"time_limit={seconds}s"]


def _memory(text: str) -> list[str]:
    """Megabytes unless a suffix says otherwise, binary as Slurm counts."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 512M or 64G")
    return [f"{SHORT['memory']}={found.group(1)}{(found.group(2) or 'M').upper()}iB"]


def _devices(text: str) -> list[str]:
    """``N`` or ``type:N``, with ``gpu:`` before it in ``--gres``."""
    parts = text.removeprefix("gpu:").split(":") if text != "gpu" else ["1"]
    if len(parts) > 2 or not parts[-1].isdigit():
        raise ValueError(f"{text!r} is not N or TYPE:N")
    kind = [f"{SHORT['gpu_type']}={parts[0]}"] if len(parts) == 2 else []
    return [*kind, f"{SHORT['gpus']}={parts[-1]}"]


def _signal(text: str) -> list[str]:
    """``[B:]NAME@seconds``: the seconds between notice and end."""
    seconds = text.rpartition("@")[2]
    if "@" not in text or not seconds.isdigit():
        raise ValueError(f"{text!r} is not NAME@SECONDS")
    return [f"grace={seconds}s"]


def _dependency(text: str) -> list[str]:
    """``afterok:JOB[:JOB]`` and ``afterany:JOB[:JOB]``, with commas between them."""
    entries: list[str] = []
    for part in text.split(","):
        kind, *jobs = part.split(":")
        if kind not in ("afterok", "afterany") or not all(jobs) or not jobs:
            raise ValueError(f"{part!r} is not afterok:JOB or afterany:JOB")
        entries += [job if kind == "afterok" else f"{job}:ended" for job in jobs]
    return [f"after={json.dumps(entries)}"]


def _to(path: str) -> Callable[[str], list[str]]:
    return lambda text: [f"{path}={text}"]


SBATCH: dict[str, Callable[[str], list[str]]] = {
    "job-name": _to("name"),
    "partition": _to("queue"),
    "nodes": _to(SHORT["replicas"]),
    "ntasks": _to(SHORT["replicas"]),
    "cpus-per-task": _to(SHORT["cpus"]),
    "time": _time,
    "gpus-per-node": _devices,
    "gres": _devices,
    "mem": _memory,
    "requeue": lambda _: ["retry=1"],
    "signal": _signal,
    "dependency": _dependency,
}
"""The subset that is understood, each to what it sets."""
