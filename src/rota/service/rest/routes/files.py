"""Routes of the files that a job wrote into its output folder, on whichever machine they lie."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from rota.runtime.job_files import READ_BYTES_MAX, FileEntry, JobFiles
from rota.service.control.job_files import all_rows, hosts_of
from rota.service.models.base import REFUSAL, Sent, document
from rota.service.models.jobs import FileList, FileRow
from rota.service.rest.deps import JobAccess, ReadJob
from rota.spec.codec import JsonObject
from rota.spec.errors import EngineUnavailable, UnknownName, unknown

PATH_CHARS_MAX = 4096
PART_BYTES_MAX = 4 * 2**20
"""Of one answer with a range of a file."""

router = APIRouter(prefix="/api/v1", tags=["files"], responses=REFUSAL)

Path = Annotated[str, Query(max_length=PATH_CHARS_MAX)]
Node = Annotated[str, Query(max_length=200)]
_BYTES: dict[int | str, JsonObject] = {200: {"content": {"application/octet-stream": {}}}}


@router.get("/jobs/{job}/files")
async def files(on: ReadJob, path: Path = "", node: Node = "") -> Sent[FileList]:
    """What is at ``path`` of the output folder, and below it, on every machine that had an instance, or on ``node``."""
    rows, notices, absent = list[FileRow](), list[str](), list[UnknownName]()
    hosts = _machines(on, node)  # all at once: each that does not answer takes its time
    for host, found in zip(
        hosts, await asyncio.gather(*(_rows(on, host, path) for host in hosts), return_exceptions=True)
    ):
        match found:
            case UnknownName():
                absent.append(found)
            case EngineUnavailable():
                notices.append(f"{found.message}: files that are there alone are not listed")
            case BaseException():
                raise found
            case _:
                rows += [document(FileRow, row, node=host, mark=row.get("mark", "")) for row in found]
    if absent and not rows and not notices and path:
        raise absent[0]
    rows.sort(key=lambda row: (row["path"], row["node"]))
    counts = Counter(row["path"] for row in rows)
    for row in rows:
        row["mark"] = row["mark"] if counts[row["path"]] > 1 else ""
    return document(FileList, job=on.job.id, path=path, items=rows, notices=notices)


@router.get("/jobs/{job}/files/part", response_class=Response, responses=_BYTES)
async def part(
    on: ReadJob,
    path: Path,
    node: Node = "",
    offset: Annotated[int, Query(ge=0, lt=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=PART_BYTES_MAX)] = PART_BYTES_MAX,
) -> Response:
    """Bytes of a file of the output folder from ``offset`` on; none at its end. ``node`` is empty for the service's."""
    if node:
        _machines(on, node)
    parts, end = list[bytes](), offset + limit
    while offset < end:
        found = await _read(on, node, path, offset, min(end - offset, READ_BYTES_MAX))
        if not found:
            break
        parts.append(found)
        offset += len(found)
    return Response(b"".join(parts), media_type="application/octet-stream")


def _machines(on: JobAccess, node: str) -> list[str]:
    """Machines to look at: empty for that of the service and those that share its home. Raises UnknownName."""
    elsewhere = hosts_of(on.job, on.app.loop.installation)
    if not node:
        return ["", *sorted(elsewhere)]
    if node in elsewhere:
        return [node]
    ran_on = sorted(map(str, on.job.ran_on))
    if node in ran_on:
        return [""]
    raise unknown(f"{on.job.id} had no instance on {node!r}", node, ran_on, "nodes")


def _area(on: JobAccess) -> str:
    return on.job.spec.output_dir or "output"


async def _rows(on: JobAccess, host: str, path: str) -> list[FileEntry]:
    app, job, area = on.app, on.job.id, _area(on)
    if host:
        return await all_rows(partial(app.engine.list_files, host, job, area, path))
    here = partial(JobFiles(app.home).listed, job, area, path)
    return await all_rows(lambda after: asyncio.to_thread(here, after))


async def _read(on: JobAccess, host: str, path: str, offset: int, count: int) -> bytes:
    app, job, area = on.app, on.job.id, _area(on)
    if host and host in hosts_of(on.job, app.loop.installation):
        return await app.engine.read_file(host, job, area, path, offset, count)
    return await asyncio.to_thread(JobFiles(app.home).read, job, area, path, offset, count)
