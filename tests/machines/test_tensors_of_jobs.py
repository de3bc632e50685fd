"""Weights, results that stay where they were made, streams and gradients of a job whose roles are on two machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.machines.bed import bed
from tests.machines.site import Site, long, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CODE = """
import hashlib, json, os, socket

import numpy as np

import rota


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


class Actor(rota.Workload):
    def setup(self, ctx):
        kept = ctx.restored
        self.w = np.array(kept["w"]) if kept else np.arange(200_000, dtype=np.float64)

    @rota.op
    def update(self, batch):
        batch = np.asarray(batch)
        self.w = self.w * 1.5 + batch.sum(axis=0)
        return {"w": digest(self.w), "host": socket.gethostname()}

    @rota.op.state
    def state(self):
        return {"w": self.w}

    @rota.op.publish
    def weights(self):
        return {"w": self.w}


class Rollout(rota.Workload):
    @rota.op.weights
    def load(self, version, tensors):
        self.version, self.w = version, tensors["w"]

    @rota.op
    def sample(self, n):
        made = np.stack([self.w * (n + 1), self.w + n])
        return {"w": digest(self.w), "version": self.version, "made": made, "host": socket.gethostname()}


async def loop(f):
    hosts = set()
    for n in range(f.committed + 1, 13):
        batch = np.full((2, 200_000), float(n)) if n == 1 else None
        if n > 1:
            got = await f.roles.rollout.sample(n)
            assert got["version"] == n - 1 and got["w"] == before, (n, got, before)
            hosts.add(got["host"])
            batch = got["made"]
        done = await f.roles.actor.update(batch)
        hosts.add(done["host"])
        before = done["w"]
        await f.commit({"n": n})
    print("RESULT", json.dumps({"w": before, "hosts": sorted(hosts)}), flush=True)
"""
JOB = """
name: share
roles:
  actor: {{workload: "share:Actor", resources: {{cpus: 1}}}}
  rollout: {{workload: "share:Rollout", resources: {{cpus: 1}}, {where}: [{{role: actor, level: node}}]}}
  loop: {{workload: "share:loop", resources: {{cpus: 1}}}}
weights:
  - {{from: actor, to: rollout, every: 1}}
"""


@pytest.fixture(scope="module")
def over_two() -> Iterator[Site]:
    with bed(2, subnet=81) as machines, site(machines, shared=True) as made:
        made.put("share.py", CODE)
        yield made


def result(over_two: Site, text: str) -> dict[str, Any]:
    job = over_two.submit(text)
    ended = over_two.ended(job)
    lines = over_two.rota("logs", job)
    assert ended["state"] == "SUCCEEDED", (ended, lines)
    (found,) = [json.loads(line.split("RESULT ")[1]) for line in lines.splitlines() if "RESULT " in line]
    return found


@long
def test_weights_and_results_between_machines_are_those_of_one_machine(over_two: Site) -> None:
    apart = result(over_two, JOB.format(where="apart"))
    together = result(over_two, JOB.format(where="collocate"))
    assert apart["hosts"] == ["m0", "m1"] and len(together["hosts"]) == 1
    assert apart["w"] == together["w"]
    over_two.until(over_two.tensors, {"m0": [], "m1": []})
