"""Every job and script on the pages for newcomers is read by the same code that reads theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rota.service.jobfile.reader import read_job
from rota.service.jobfile.scripts import script_body
from rota.spec.job import JobSpec

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```(yaml|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown(page: str) -> list[JobSpec]:
    """The jobs of a page."""
    found: list[JobSpec] = []
    for kind, text in BLOCK.findall((PAGES / page).read_text(encoding="utf-8")):
        if kind == "bash":
            body = script_body(text, filename="train.sh", workdir="/tmp")
            found.append(read_job(body["source"], filename="train.sh", sets=body["sets"]))
        else:
            found.append(read_job(text, filename=page))
    return found


def test_the_sbatch_script_becomes_the_job_it_describes() -> None:
    [job] = shown("from-sbatch.md")
    main = job.role("main")
    assert (job.name, job.queue, job.time_limit_s, job.retry > 0) == ("resnet", "research", 8 * 3600, True)
    assert (main.res.cpus, main.res.gpus, main.res.memory_bytes) == (4, 1, 16 * 2**30)
    assert main.meshed and dict(main.mesh) == {"dp": 2}


def test_the_older_form_becomes_roles() -> None:
    [job] = shown("from-openpai.md")
    assert [(role.name, role.replicas_min, role.res.gpus) for role in job.roles] == [("ps", 1, 0), ("worker", 2, 1)]
    assert (job.data, job.output, job.image) == ("/data/mnist", "/out", "pytorch")


@pytest.mark.parametrize(("page", "worlds"), [("from-torchrun.md", [True, False, False]), ("from-dlrover.md", [True])])
def test_a_torchrun_line_stays_one_and_makes_one_world(page: str, worlds: list[bool]) -> None:
    jobs = shown(page)
    assert [job.roles[0].torchrun for job in jobs] == worlds
    assert all(job.roles[0].meshed for job in jobs)
