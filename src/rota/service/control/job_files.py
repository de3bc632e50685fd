"""Files of a job wherever they lie: on this machine, or on machines that do not see the home of the service."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rota.runtime.clock import Clock, iso
from rota.runtime.data_cache import NOTES_MAX, DataFailed, Uploaded, apart
from rota.runtime.environ import Home
from rota.runtime.job_files import FILES_LABEL, FIRST_READ_S, OWN_FILES, READ_BYTES_MAX, FileEntries, FileEntry
from rota.runtime.output import LocalLog, LogFile, instance_of, key_of, log_files
from rota.service.control.engine import Engine
from rota.service.control.submission import store_environ
from rota.service.views.installation import Installation
from rota.service.views.job_history import JobHistory
from rota.spec.errors import EngineUnavailable, RotaError, UnknownName
from rota.spec.events import UploadEnded
from rota.spec.ids import JobId

T = TypeVar("T")

ANSWER_S = FIRST_READ_S + 3.0
"""Longest wait for all machines together, longer than the gateway waits for one."""
AGAIN_S = 10.0
"""A machine that did not answer is left alone for this long, by all requests."""
THREADS_MAX = 8
"""Requests that wait for other machines at once; they have threads of their own, so that no other request waits."""
SEEN_MAX = 2000
UPLOAD_PAUSES_S = (5.0, 30.0, 120.0)
"""Pauses before further tries of an upload, each of which tries every file several times."""

_log = logging.getLogger("rota.service")


@dataclass(slots=True)
class SeenLog:
    """What was last known of a log on another machine: its size at a time, and up to where it was read."""

    at: float
    bytes: int
    read: int = 0


@dataclass(slots=True)
class SeenLogs:
    """Logs on other machines as this service last knew them, the newest ``SEEN_MAX``; by job, machine and instance.

    ``silent`` has the machines that did not answer: until when they are left alone (monotonic seconds), and why.
    """

    rows: OrderedDict[tuple[JobId, str, str], SeenLog] = field(
        default_factory=OrderedDict[tuple[JobId, str, str], SeenLog]
    )

    silent: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS_MAX, "logs-elsewhere"))

    def note(self, key: tuple[JobId, str, str], at: float, size: int) -> SeenLog:
        """Remember the size of a log."""
        known = self.rows.setdefault(key, SeenLog(at, size))
        known.at, known.bytes = at, size
        self.rows.move_to_end(key)
        while len(self.rows) > SEEN_MAX:
            self.rows.popitem(last=False)
        return known


@dataclass(frozen=True, slots=True)
class RemoteLog:
    """The log of an instance on another machine, read by range; ``seen`` has its size of a moment ago."""

    files: JobFilesElsewhere
    node: str
    instance: str
    seen: SeenLog

    def size(self) -> int:
        return self.seen.bytes

    def read(self, offset: int, count: int) -> bytes:
        """In pieces of what one call carries; nothing is asked for beyond the known size."""
        parts, end = list[bytes](), min(offset + count, self.seen.bytes)
        while offset < end:
            part = self.files.read(self.node, f"{self.instance.replace('/', '-')}.log", offset, end - offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
        self.seen.read = max(self.seen.read, offset)
        return b"".join(parts)


class JobFilesElsewhere:
    """The logs of one job on other machines, for a thread; ``loop`` is where the engine is asked.

    ``silent`` has the machines that did not answer, with the reason of each.
    """

    def __init__(
        self, job: JobHistory, installation: Installation, engine: Engine, seen: SeenLogs, clock: Clock
    ) -> None:
        self._job, self._installation, self._engine, self._seen, self._clock = job, installation, engine, seen, clock
        self._loop = asyncio.get_running_loop()
        self.silent = dict[str, str]()

    @property
    def hosts(self) -> list[str]:
        """Machines that had a process of the job and do not see the home of the service."""
        return sorted(hosts_of(self._job, self._installation))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what may wait for other machines, in a thread that no other request needs."""
        threads = self._seen.threads if self.hosts else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def logs(self) -> dict[str, LogFile]:
        """Logs that the machines have now; one that does not answer is asked again ``AGAIN_S`` later."""
        asked = {
            host: self._ask(self._engine.list_files(host, self._job.id, "logs"))
            for host in self.hosts
            if not self._left_alone(host)
        }
        until_s = self._clock.monotonic_s() + ANSWER_S
        found = dict[str, LogFile]()
        for host, future in asked.items():
            try:
                rows = future.result(max(0.0, until_s - self._clock.monotonic_s()))["items"]
            except UnknownName:  # nothing was written there yet
                rows = list[FileEntry]()
            except (RotaError, TimeoutError) as error:
                future.cancel()
                self._give_up(host, error)
                continue
            self._seen.silent.pop(host, None)
            self.silent.pop(host, None)
            for row in rows:
                if row["kind"] == "file" and row["path"].endswith(".log"):
                    instance = instance_of(Path(row["path"]))
                    seen = self._seen.note((self._job.id, host, instance), self._clock.wall_s(), row["bytes"])
                    log = RemoteLog(self, host, instance, seen)
                    found[key_of(log)] = log
        return found

    def read(self, host: str, name: str, offset: int, count: int) -> bytes:
        """A range of a log. Raises OSError when its machine does not answer."""
        if self._left_alone(host):
            raise OSError(self.silent[host])
        limit = min(count, READ_BYTES_MAX)
        future = self._ask(self._engine.read_file(host, self._job.id, "logs", name, offset, limit))
        try:
            return future.result(ANSWER_S)
        except (RotaError, TimeoutError) as error:
            future.cancel()
            self._give_up(host, error)
            raise OSError(f"{host}: {error}") from error

    def notices(self) -> list[str]:
        """What is not shown, why, and what was known of it, a sentence for each machine that does not answer."""
        return [self._notice(host, why) for host, why in sorted(self.silent.items())]

    def _notice(self, host: str, why: str) -> str:
        there = list[str]()
        for one in sorted(hosts_of(self._job, self._installation).get(host, ())):
            known = self._seen.rows.get((self._job.id, host, one))
            last = "never read"
            if known is not None:
                last = f"{known.bytes:,} bytes at {iso(known.at)}, of which {known.read:,} were read"
            there.append(f"{one} ({last})")
        return f"{why}; the output of {', '.join(there)} is on {host} and is not shown"

    def _left_alone(self, host: str) -> bool:
        """Whether another request found a machine silent a moment ago; then it is so for this one."""
        until_s, why = self._seen.silent.get(host, (0.0, ""))
        if self._clock.monotonic_s() >= until_s:
            return False
        self.silent[host] = why
        return True

    def _give_up(self, host: str, error: Exception) -> None:
        said = str(error) or f"nothing in {ANSWER_S:g} s"
        why = said if isinstance(error, EngineUnavailable) else f"{host} does not answer: {said}"
        self.silent[host] = why
        if isinstance(error, (EngineUnavailable, TimeoutError)):  # of the machine; another error is of this job alone
            self._seen.silent[host] = (self._clock.monotonic_s() + AGAIN_S, why)

    def _ask(self, question: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(question, self._loop)


def hosts_of(job: JobHistory, installation: Installation) -> dict[str, set[str]]:
    """Machines that had a process of a job and do not see the home of the service, with the instances they had."""
    found = dict[str, set[str]]()
    for node, members in tuple(job.ran_on.items()):
        known = installation.nodes.get(node)
        if known is not None and (FILES_LABEL, OWN_FILES) in known.node.labels:
            found[str(node)] = {str(one) for one in members}
    return found


def local_logs(folder: Path) -> dict[str, LogFile]:
    """Logs of a job on this machine."""
    return {instance: LocalLog(path) for instance, path in log_files(folder).items()}


def wanted_logs(files: Mapping[str, LogFile], role: str, rank: int | None) -> dict[str, LogFile]:
    """The logs of one role or instance, or all."""
    wanted = f"{role}/{rank}" if rank is not None else ""
    return {
        key: log
        for key, log in files.items()
        if (not role or log.instance.rpartition("/")[0] == role) and (not wanted or log.instance == wanted)
    }


async def all_rows(listed: Callable[[str], Awaitable[FileEntries]]) -> list[FileEntry]:
    """Every row of ``JobFiles.listed``, page by page: ``listed`` gives the one after a path."""
    rows, after = list[FileEntry](), ""
    while True:
        page = await listed(after)
        rows += page["items"]
        if page["next"] is None:
            return rows
        after = page["next"]


async def texts_elsewhere(
    job: JobHistory, installation: Installation, engine: Engine, area: str
) -> list[tuple[str, str]]:
    """Names and texts of small files of a job on other machines; a machine that does not answer is left out."""
    found = list[tuple[str, str]]()
    for host in sorted(hosts_of(job, installation)):
        try:
            for row in await all_rows(partial(engine.list_files, host, job.id, area, "")):
                parts, offset = list[bytes](), 0
                while offset < row["bytes"]:
                    part = await engine.read_file(host, job.id, area, row["path"], offset, READ_BYTES_MAX)
                    parts.append(part)
                    offset += len(part) or row["bytes"]
                found.append((row["path"], b"".join(parts).decode(errors="replace")))
        except (EngineUnavailable, UnknownName):
            continue
    return found


async def upload_output(
    job: JobHistory, installation: Installation, engine: Engine, home: Home, clock: Clock
) -> UploadEnded:
    """Copy the output folder of a job, from every machine that had a process of it, to the URL of its output.

    Tried again after each of ``UPLOAD_PAUSES_S``; then the event says why not, and where the files stay.
    """
    url, dirs, began_s = job.spec.output_url or "", home.job(job.id), clock.monotonic_s()
    env = store_environ(job.spec, job.submitted.user)
    for pause_s in (*UPLOAD_PAUSES_S, None):
        try:
            notes = await _gather(job, installation, engine, home)
            found = await apart("upload", str(home.root), url, str(dirs.output), str(dirs.gathered), env=env)
        except (DataFailed, RotaError, OSError) as error:
            _log.warning("output of %s: %s", job.id, error)
            if pause_s is not None:
                await clock.sleep(pause_s)
                continue
            where = " and ".join((str(dirs.output), *(f"on {host}" for host in sorted(hosts_of(job, installation)))))
            said = f"output: {error}; its files stay in {where}; copy them: rota cp {job.id}: FOLDER"
            return UploadEnded(url=url, seconds=clock.monotonic_s() - began_s, error=said)
        finally:
            await asyncio.to_thread(shutil.rmtree, dirs.gathered, ignore_errors=True)
        done: Uploaded = json.loads(found)
        notes += [f"{name} is a link or a socket, and was left out" for name in done["left_out"]]
        seconds = clock.monotonic_s() - began_s
        return UploadEnded(url=url, files=done["files"], bytes=done["bytes"], seconds=seconds, notes=tuple(notes))
    raise AssertionError("the last try returns")


async def _gather(job: JobHistory, installation: Installation, engine: Engine, home: Home) -> list[str]:
    """Copy the files of other machines into ``gathered``. A name that is taken gets ``@NODE``; those are returned."""
    dirs, notes = home.job(job.id), list[str]()
    for host in sorted(hosts_of(job, installation)):
        try:
            rows = await all_rows(partial(engine.list_files, host, job.id, "output", ""))
        except UnknownName:  # nothing was written there
            continue
        for row in rows:
            if row["kind"] != "file":
                continue
            name = row["path"]
            if (dirs.output / name).exists() or (dirs.gathered / name).exists():
                name = f"{name}@{host}"
                notes.append(f"several machines have {row['path']}: that of {host} is {name}")
            await _copy_file(engine, host, job.id, row, dirs.gathered / name)
    return notes[:NOTES_MAX]


async def _copy_file(engine: Engine, host: str, job: JobId, row: FileEntry, place: Path) -> None:
    await asyncio.to_thread(place.parent.mkdir, parents=True, exist_ok=True)
    with place.open("wb") as file:
        while file.tell() < row["bytes"]:
            part = await engine.read_file(host, job, "output", row["path"], file.tell(), READ_BYTES_MAX)
            if not part:
                raise OSError(f"{row['path']} on {host} became shorter while it was read")
            await asyncio.to_thread(file.write, part)
