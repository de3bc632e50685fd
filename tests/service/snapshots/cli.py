"""What every verb prints: its ``--json`` document, and its plain output at 80 columns."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from tests.service.snapshots.installation import LIMIT_S, QUEUES, START_S, URL, Installed, job_file
from tests.service.snapshots.normal import normal

from rota.service import demo, doctor, offline, plans, tensor_documents
from rota.service.cli import app, output
from rota.service.cli.verbs import formatting
from rota.service.client import Client
from rota.service.process import backup, daemon, joined

COLUMNS = 80
MODEL = {"layers": 4, "hidden": 512, "heads": 8, "seq": 512, "vocab": 32000, "tied": False}
FILES = {
    "job.yaml": job_file("hello"),
    "bad.yaml": "nmae: x\nroles:\n  main:\n    rum: [echo]\n",
    "queues.yaml": json.dumps([*QUEUES, {"path": "more", "weight": 2}]),
    "jobs.csv": "job_id,submit_s,duration_s,gpus,vc\na,0,100,8,x\nb,10,100,8,x\nc,20,50,8,y\nz,0,1,640,x\n",
    "vcs.csv": "vc,nodes\nx,1\ny,1\n",
    "nodes.csv": "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,4,A100\n",
    "pods.csv": "cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n4000,1024,1,1000,\n4000,1024,1,500,\n",
    "cases.json": json.dumps(
        {
            "cases": [
                {
                    "id": "one",
                    "kind": "gang",
                    "given": {"gpus": 4, "jobs": {"a": {"tasks": 8}}},
                    "expect": {"waiting": ["a"]},
                }
            ]
        }
    ),
    "model.json": json.dumps(MODEL),
    "tables.json": (Path(__file__).parents[2] / "data" / "planner_time_tables.json").read_text(),
}
SEARCH = "plan search --model model.json --gpus 2 --memory 8 --batch 4"
READS = (
    *("ps", "ps -a", "ps -a -o wide", "ps --state FAILED", "ps --columns job,state,nodes --sort name", "ps --mine"),
    *("sweep", "sweep tune", "run job.yaml --sweep lr=1,2 --sweep seed=1..2 --dry-run"),
    *(f"show {job}" for job in ("learn-1", "heal-1", "crash-1", "big-1", "cancel-1")),
    *("show learn-1 --spec", "show nothing-1"),
    *(f"explain {job}" for job in ("big-1", "learn-1", "crash-1", "tail-1")),
    *(f"explain {job} --what-if gpus=1" for job in ("big-1", "crash-1")),
    *(f"failures {job}" for job in ("learn-1", "heal-1", "crash-1", "big-1")),
    *(f"why {job}" for job in ("learn-1", "heal-1", "begin-1", "big-1")),
    *("graph learn-1", "graph learn-1 --format dot", "graph job.yaml"),
    *("cp learn-1: --list", "cp learn-1:report.json copied.json", "cp learn-1:nowhere .", "cp learn-1:../x ."),
    *("export learn-1 --hf out", "export nothing-1 --hf out"),
    *("logs learn-1", "logs learn-1 loop --tail 2", "logs big-1", "logs done-1 --grep x"),
    *("events learn-1", "events", "events learn-1 --type Committed", "events done-1 -f"),
    *("top", "top learn-1", "trace learn-1", "trace learn-1 out.json"),
    *("nodes", "nodes -o wide", "alerts", "queues", "report", "report --by queue --since 1d", "report --csv"),
    *("status", "status --settings -o wide", "token", "token ls", "user", "user ls", "secret", "webhook"),
    *("run job.yaml --check", "run bad.yaml --check", "run job.yaml --dry-run", "run --dry-run -- python x.py"),
    *("nodes drain r0n0 --dry-run", "queues apply queues.yaml --dry-run", "explain nothing-1", "frob", "ps --frob"),
)
CHANGES = (
    *(
        "run job.yaml -n again -d",
        "run job.yaml -n quietly -d --quiet",
        "set tail-1 priority=80 labels.k=v",
        "set tail-1 x=1",
    ),
    *("scale grow-1 serve 3", "pause tail-1", "resume tail-1", "stop tail-1 done-1", "stop -l team=vision -y"),
    *("exec learn-1 rollout/0 -- echo out", "nodes drain r0n0 -y", "nodes undrain r0n0"),
    *("nodes show r0n0", "doctor --nodes"),
    *("queues apply queues.yaml", "user create zed --role viewer --queue prod", "user rm zed"),
    *("token create --name spare", "secret set NEW", "secret rm NEW", f"login {URL}", "logout", "ui --print"),
    *("webhook add https://93.184.216.35/x --on failed", "audit --limit 5", "audit --user ann"),
    *("run job.yaml --sweep lr=1,2 --metric loss -d", "sweep hello", "clone done-1 --set priority=7 -d"),
)
UNSETTLED = {"run job.yaml --sweep lr=1,2 --metric loss -d"}
"""Shows jobs submitted a moment ago, queued or not yet: what comes of them is shown by the next command."""
ALONE = (
    *(
        "up",
        "join 10.0.0.5 --token t",
        "leave",
        "down",
        "down --jobs leave --force",
        "doctor",
        "demo",
        "backup out.tgz",
        "restore out.tgz",
    ),
    *("init", "init ddp --dir made", "init --list", "completion show bash", "completion show tcsh"),
    *("sim run --trace jobs.csv --vcs vcs.csv", "sim run --trace jobs.csv --vcs vcs.csv --jobs", "sim run"),
    *("sim compare --trace jobs.csv --vcs vcs.csv --profiles private,pool", "sim cases cases.json"),
    *(
        "sim fgd --nodes nodes.csv --pods pods.csv",
        "plan validate tables.json --table none",
        "plan validate tables.json --table megatron_seqpar_table5",
    ),
    *(SEARCH, f"{SEARCH} --pin tp=3", "plan show found.json", "plan explain found.json --why-not tp=2"),
    *("plan calibrate here.json", "tensors ls", "tensors stat w", "tensors top", "tensors gc", "tensors fsck"),
    *("tensors doctor", "tensors recover", "tensors stat w -o yaml"),
)
"""Commands that need no service; what they would start or measure is played."""
FROM_STDIN = {"secret set": "s3cret-value\n", "login": ""}
SPREADS = {"wait_s", "jct_s", "response_s"}
MEASURED = {"elapsed_s", "wall_s", "tasks_per_s", "jobs_per_s", "p50", "p99"}
"""Fields that differ from run to run."""
VARYING = re.compile(
    r"(?<=, )\d+\.\d+ s$|(?<=took  )\s*\d+\.\d+ s|(?<=dropped, )\d+(?= a second)"
    r"|(?<=secret  )\S{30,}|(?<=digest=)[0-9a-f.]{20,}"
)
PLAIN_ONLY, SQUEEZED = ("events",), ("status --settings -o wide",)
"""The document is that of a route with hundreds of records; the width of the table is that of a path."""
ANSWERS: dict[str, dict[str, Any]] = {
    "tensor_list": {
        "kind": "TensorList",
        "items": [
            {
                "name": "weights/actor",
                "kind": "tensor",
                "version": 3,
                "step": 40,
                "dtype": "bfloat16",
                "shape": [4096, 1024],
                "bytes": 8388608,
                "leases": 2,
                "owner": "actor/0",
                "state": "committed",
                "age_s": 75.0,
            },
            {
                "name": "batch",
                "kind": "group",
                "version": 1,
                "step": None,
                "dtype": "",
                "shape": None,
                "bytes": 0,
                "leases": 0,
                "owner": "",
                "state": "committed",
                "age_s": 3.0,
            },
        ],
        "next": None,
    },
    "tensor": {
        "kind": "Tensor",
        "form": "tensor",
        "name": "w",
        "dtype": "float32",
        "shape": [4],
        "versions": [
            {
                "version": 2,
                "state": "committed",
                "bytes": 4096,
                "leases": 1,
                "holders": [{"client": "c1", "pid": 41, "age_s": 2.0}],
            }
        ],
    },
    "tensor_top": {
        "kind": "TensorTop",
        "items": [{"name": "w", "bytes": 4096, "doomed_bytes": 0, "versions": 2, "leases": 1}],
        "next": None,
    },
    "tensor_gc": {"kind": "TensorGc", "swept": 1, "trimmed_bytes": 4096, "dropped": [], "dry_run": False},
    "tensor_fsck": {
        "kind": "TensorFsck",
        "checked": 7,
        "violations": [{"rule": "leases", "object": "w", "detail": "holder is gone", "repaired": False}],
        "registry_bytes": 1,
        "disk_bytes": 1,
    },
    "tensor_doctor": {
        "kind": "TensorDoctor",
        "checks": [
            {"name": "memory", "level": "ok", "value": "1 GiB free", "remedy": ""},
            {"name": "registry", "level": "fail", "value": "does not answer", "remedy": "rota tensors recover"},
        ],
    },
    "tensor_recover": {
        "kind": "TensorRecover",
        "epoch": 2,
        "names": 3,
        "leases": 1,
        "promoted": 0,
        "quarantined": [],
        "lost": [],
        "seconds": 0.5,
    },
}
STATUS = {
    "api": "rota/v1",
    "kind": "Status",
    "state": "up",
    "started": True,
    "url": URL,
    "login": f"{URL}/login?code=x",
    "home": "/srv/rota",
    "version": "1",
    "profile": "fifo",
    "started_at": "2023-11-14T22:13:20.000Z",
    "parts": {"engine": {"state": "running"}, "registry": {"state": "off", "text": "no server"}},
    "cluster": {"nodes": 4, "nodes_bad": 0, "gpus": 16, "gpus_used": 2, "jobs": {"RUNNING": 1}},
    "warnings": ["the disk is nearly full"],
}
DOWN = {
    "api": "rota/v1",
    "kind": "Status",
    "state": "down",
    "ended": ["service", "gateway"],
    "still_running": [],
    "stopped_jobs": [],
    "left_jobs": {"RUNNING": 1, "QUEUED": 2},
    "text": "",
}
JOINED = {
    "api": "rota/v1",
    "kind": "Join",
    "state": "joined",
    "host": "m1",
    "url": "http://10.0.0.5:7700",
    "address": "10.0.0.6",
    "text": "m1 joined http://10.0.0.5:7700",
    "ended": [],
    "still_running": [],
}
KEPT = {
    "api": "rota/v1",
    "kind": "Backup",
    "file": "out.tgz",
    "home": "/srv/rota",
    "records": 9,
    "files": 2,
    "pretend": "",
}
HARDWARE = {
    "api": "rota/v1",
    "kind": "PlanCalibration",
    "measured": [{"name": "matmul", "value": 1.5, "low": 1.25, "high": 2.0}],
    "file": "here.json",
}
FINDINGS = (
    doctor.DoctorFinding(name="python", mark="ok", fact="3.11.2"),
    doctor.DoctorFinding(name="ray", mark="warn", fact="not installed", remedy="pip install ./"),
)


def _outcome(say: demo.Say) -> demo.Outcome:
    say("learn-1 submitted")
    kill = demo.Kill(victim="actor/1", pid=1, at=170, wall_s=START_S, new_pid=2, healed_s=1.5)
    lists: dict[str, Any] = {"waiting": [], "failures": [], "events": []}
    figures = {"reward_before": 0.25, "reward_after": 0.75, "rise": 0.5}
    return demo.Outcome(
        job="learn-1",
        state="SUCCEEDED",
        seconds=9.0,
        commits=[1],
        figures=figures,
        kills=[kill],
        problems=["one"],
        **lists,
    )


class _InProcess(httpx.BaseTransport):
    """Requests of a thread to an application that runs in an event loop."""

    def __init__(self, it: Installed, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = httpx.ASGITransport(app=it.served), loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._sent(request), self._loop).result(LIMIT_S)

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        copied = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
        answer = await self._transport.handle_async_request(copied)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


@contextmanager
def _played(it: Installed, transport: httpx.BaseTransport, folder: Path) -> Iterator[None]:
    """The service in this process, time that stands still, and nothing that is started or measured."""
    made = Client.__init__

    def init(self: Client, *given: Any, **more: Any) -> None:
        made(self, *given, **{**more, "transport": transport})

    with ExitStack() as changed:
        for owner, name, value in (
            (Client, "__init__", init),
            (formatting, "now", lambda: datetime.fromtimestamp(it.time.wall_s(), UTC)),
            (output, "WIDTH_PIPE", COLUMNS),
            (daemon, "up", lambda _: STATUS),
            (daemon, "down", lambda *_, **__: DOWN),
            (joined, "join", lambda *_, **__: JOINED),
            (joined, "leave", lambda *_, **__: {**JOINED, "state": "left", "text": "", "ended": ["agent", "engine"]}),
            (backup, "back_up", lambda *_, **__: KEPT),
            (backup, "restore", lambda *_, **__: KEPT | {"jobs": 1, "pretend": ""}),
            (demo, "play", lambda _, say, **__: _outcome(say)),
            (doctor, "CHECKS", (lambda _: iter(FINDINGS),)),
            (plans, "calibrate_document", lambda *_, **__: HARDWARE),
            (offline, "export_checkpoint", lambda *_: 40),
            *((tensor_documents, name, _answered(document)) for name, document in ANSWERS.items()),
        ):
            changed.enter_context(patch.object(owner, name, value))
        changed.enter_context(
            patch.dict(
                os.environ, {"ROTA_HOME": str(it.home), "ROTA_SERVER": URL, "TZ": "UTC", "COLUMNS": str(COLUMNS)}
            )
        )
        before = Path.cwd()
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _answered(document: Mapping[str, Any]) -> Any:
    return lambda *_, **__: {"api": "rota/v1", **document}


async def commands(it: Installed, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every command with what it printed, by verb."""
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    found: dict[str, list[dict[str, Any]]] = {}
    transport = _InProcess(it, asyncio.get_running_loop())
    with _played(it, transport, folder):
        for line in (*READS, *ALONE):
            for form in ("", "--json") if line not in PLAIN_ONLY else ("",):
                await _done(it, line, form, folder, found)
        for line in CHANGES:
            it.time.advance(1.0)
            await _done(it, line, "--json", folder, {} if line in UNSETTLED else found)
            await it.settle()
            if not line.startswith("run"):
                await _done(it, line, "", folder, found)
                await it.settle()
    return dict(sorted(found.items()))


async def _done(it: Installed, line: str, form: str, folder: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    head, dashes, tail = line.partition(" -- ")
    words = [*head.split(), *form.split(), *([dashes.strip(), *tail.split()] if dashes else [])]
    status, out, err = await asyncio.wait_for(asyncio.to_thread(_run, words, it), LIMIT_S)
    if line == SEARCH and form:
        (folder / "found.json").write_text(out)
    names = {str(folder): "<folder>", f"pid={os.getpid()} ": "pid=<pid> "}
    shown = [VARYING.sub("<measured>", normal(text, it.home)) for text in (out, err)]
    if line in SQUEEZED and not form:
        shown = [re.sub(" +|─+", " ", text) for text in shown]
    for name, label in names.items():
        shown = [text.replace(name, label) for text in shown]
    document = _parsed(shown[0]) if form else shown[0].splitlines()
    row = {
        "command": f"rota {' '.join(words)}",
        "status": status,
        "out": normal(document, it.home),
        "err": shown[1].splitlines(),
    }
    verb = next((one for one in (" ".join(words[:2]), words[0]) if one in app.VERBS), "mistakes")
    found.setdefault(verb.replace(" ", "-"), []).append(row)


def _run(words: list[str], it: Installed) -> tuple[int, str, str]:
    """One command in this thread, which alone prints meanwhile."""
    out, err = io.StringIO(), io.StringIO()
    given = next((text for start, text in FROM_STDIN.items() if " ".join(words).startswith(start)), "")
    stdin = io.StringIO(given or it.app.home.token.read_text())
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "stdin", stdin):
        status = app.call(words)
    return status, out.getvalue(), err.getvalue()


def _parsed(text: str) -> Any:
    """The document, or the documents of a stream; of what is no JSON its lines."""
    try:
        return _settled(json.loads(text))
    except ValueError:
        try:
            return [_settled(json.loads(line)) for line in text.splitlines()]
        except ValueError:
            return text.splitlines()


def _settled(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: one if key in SPREADS else _settled(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_settled(one, name) for one in value]
    return "<measured>" if name in MEASURED and isinstance(value, float) else value
