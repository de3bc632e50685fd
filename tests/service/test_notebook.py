"""What a notebook shows: jobs, documents, progress, errors with their hint; and what it cannot run."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from standing import HELLO, Standing, listening, with_service

import rota
from rota.service.api import body_of
from rota.service.client import Client
from rota.service.notebook import COLUMNS_MAX, ROWS_MAX, html_of
from rota.service.templates import template_files
from rota.spec.errors import BadInput
from rota.spec.states import JobState


def test_documents_are_tables_with_the_texts_of_jobs_escaped() -> None:
    rows = [{"job": f"a-{n}", "text": "<script>", "empty": ""} | {f"c{k}": k + 1 for k in range(20)} for n in range(99)]
    shown = html_of({"api": "rota/v1", "kind": "JobList", "items": rows, "next": None})
    assert shown.startswith("<b>JobList</b>") and "<script>" not in shown and "&lt;script&gt;" in shown
    assert shown.count("<tr>") == ROWS_MAX + 1 and shown.count("<th>") == COLUMNS_MAX and "<th>empty" not in shown
    assert f"{99 - ROWS_MAX} more rows" in shown and "columns left out: c10" in shown


def test_a_command_may_have_a_name_and_a_job_says_what_it_is() -> None:
    body = body_of(None, command=["python", "t.py"], res={"name": "mine", "gpus": 1})
    assert "source" in body and json.loads(body["source"])["name"] == "mine", (
        "a mistake is placed in it, not in a --set"
    )
    assert body["sets"] == ["roles.main.resources.gpus=1"]
    with pytest.raises(BadInput, match="takes no 'nodes'"):
        body_of(None, command=["x"], res={"nodes": 2})
    job = rota.Job("sums")
    job.role("main", run="echo hi", n=3)
    assert repr(job) == "Job('sums', main x3)"
    assert str(BadInput("no such file", hint="rota init --list")) == "no such file (rota init --list)"


def test_a_class_of_stdin_is_refused_with_what_to_do() -> None:
    body = "async def setup(self, ctx): pass\n    @rota.op()\n    async def go(self): pass\n"
    role = f"class Actor(rota.Workload):\n    {body}"
    code = f"import rota\n{role}rota.Job('j').role('actor', Actor)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, check=False, timeout=180)
    assert "Actor is defined in a notebook or on stdin" in done.stderr and "put it in a file" in done.stderr


def test_a_handle_shows_itself_and_the_progress_of_a_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def test(service: Standing) -> None:
        await service.submit(HELLO.replace("{gpus: 2}", "{gpus: 4}\n    replicas: 2"))
        await service.until("hello-1", JobState.ADMITTED)  # nothing is free: what follows waits, and can be cancelled
        async with listening(service) as http:
            token = http.headers["authorization"].split()[1]

            def ask() -> None:
                with Client(str(http.base_url), token) as client:
                    assert repr(client).startswith("Client('http://127.0.0.1")
                    client.run(command=["sleep", "9"], name="nap", gpus=99)

            with pytest.raises(Exception, match="gpus"):
                await asyncio.to_thread(ask)

            def wait() -> None:
                with Client(str(http.base_url), token) as client:
                    job = client.run(command=["sleep", "9"], name="nap", gpus=1)
                    assert "nap-1" in job._repr_html_() and "<table>" in job._repr_html_()
                    assert "<table>" in client.jobs()._repr_html_()  # type: ignore[attr-defined]
                    job.stop()
                    job.wait(progress=True)
                    assert job.state is JobState.CANCELLED

            waiting = asyncio.create_task(asyncio.to_thread(wait))
            await asyncio.wait_for(waiting, 60)
            assert capsys.readouterr().err.splitlines()[-1].startswith("nap-1 CANCELLED")

    with_service(tmp_path, test)


def test_the_page_of_notebooks_shows_the_cells_of_the_template() -> None:
    page = (Path(rota.__file__).parents[2] / "docs" / "how-to" / "use-a-notebook.md").read_text(encoding="utf-8")
    notebook = json.loads(template_files("notebook")["notebook.ipynb"])
    assert notebook["nbformat"] == 4 and {one["cell_type"] for one in notebook["cells"]} == {"code", "markdown"}
    shown = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert shown == ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]
    words = ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "markdown"]
    assert words and all(text in page for text in words)
