"""Shipped examples over two and three machines: what they write is what one machine gives, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.machines.bed import bed
from tests.machines.site import Site, long, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE_S = 800.0
HEAD_CPUS, CPUS = 2, 1
FREE = {2: 1.0, 3: 0.87}
"""Cores that are left on each machine: two of them, or all three, are needed for a job of 1.8 and 1.9 cores."""


@pytest.fixture(scope="module")
def over_three() -> Iterator[Site]:
    with bed(3, subnet=86) as machines, site(machines, cpus=(HEAD_CPUS, CPUS, CPUS)) as made:
        for name in ("grpo_sums", "mm_digits"):
            for path in (EXAMPLES / name).iterdir():
                made.put(f"{name}/{path.name}", path.read_text())
        yield made


def filler(count: int) -> str:
    """A job that leaves ``FREE`` cores on each of so many machines."""
    free = FREE[count]
    text = f"name: filler\nroles:\n  one: {{run: sleep 900, resources: {{cpus: {HEAD_CPUS - free}}}}}\n"
    if free < CPUS:
        others = f"replicas: {count - 1}, apart: [{{role: self, level: node}}]"
        text += f"  rest: {{run: sleep 900, resources: {{cpus: {CPUS - free:g}}}, {others}}}\n"
    return text


def written(over: Site, name: str, file: str, options: Sequence[str], count: int) -> str:
    """A file of an example that ran on ``count`` machines."""
    for index, machine in enumerate(over.machines[1:], 1):
        over.rota("nodes", "cordon" if index >= count else "uncordon", machine.name, "--yes")
    fills = over.submit(filler(count)) if count > 1 else ""
    if fills:
        over.until(lambda: over.json("show", fills)["state"], "RUNNING")
    job = over.json("run", str(over.code / name / "job.yaml"), "-d", *options)["id"]
    ended = over.ended(job, EXAMPLE_S)
    assert ended["state"] == "SUCCEEDED", "\n".join(over.rota(what, job)[-4000:] for what in ("failures", "logs"))
    assert len({one["node"] for one in ended["instances"]}) == count, ended["instances"]
    if fills:
        over.rota("stop", fills, "--yes")
        over.ended(fills)
    over.until(over.tensors, {machine.name: [] for machine in over.machines})
    copy = f"/tmp/{job}-{file}"
    over.rota("cp", f"{job}:{file}", copy)
    return over.head.path(copy).read_text()


@long
@pytest.mark.parametrize(
    ("name", "file", "options", "lines"),
    [
        ("grpo_sums", "metrics.jsonl", ("-e", "SFT_STEPS=2", "-e", "GRPO_STEPS=3", "--set", "weights[1].every=2"), 5),
        ("mm_digits", "curve.jsonl", ("-e", "MM_STEPS=20"), 20),
    ],
)
def test_an_example_gives_on_several_machines_what_it_gives_on_one(
    over_three: Site, name: str, file: str, options: Sequence[str], lines: int
) -> None:
    one, two, three = (written(over_three, name, file, options, count) for count in (1, 2, 3))
    assert len(one.splitlines()) == lines
    assert two == one and three == one
