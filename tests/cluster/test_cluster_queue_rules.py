"""A tree of queues that promises what there is not is refused, in every kind of resource."""

from __future__ import annotations

import pytest
from cluster_makers import node

from rota.cluster.core.quota import broken_rules
from rota.spec.queue import OwnedCells, Queue
from rota.spec.resources import Res

A = "A"
GIB = 2**30


def queue(
    path: str, gpus: float = 0, *, cpus: float = 0, gib: int = 0, type: str | None = None, most: Res | None = None
) -> Queue:
    return Queue(path=path, guaranteed=Res(cpus=cpus, gpus=gpus, memory_bytes=gib * GIB, gpu_type=type), limit=most)


@pytest.mark.parametrize(
    ("queues", "nodes", "expected"),
    [
        ((queue("a", 1),), (), []),
        ((queue("a", -1),), (), ["a: 'a' has an amount below 0"]),
        ((queue("a", most=Res(cpus=0, memory_bytes=-1)),), (), ["a: 'a' has an amount below 0"]),
        ((queue("a", 1),), (node("n", 0),), ["a: with 'a' 1 GPU is promised, the cluster has 0"]),
        ((queue("a", type=A),), (node("n", 0),), ["a: no node has devices of type 'A'"]),
        ((queue("a", 4), queue("b", 4)), (node("n", 8),), []),
        ((queue("a", 4), queue("b", 5)), (node("n", 8),), ["b: with 'b' 9 GPUs are promised, the cluster has 8"]),
        (
            (queue("a", 3, type=A), queue("b", 2, type=A)),
            (node("n", 4), node("m", 4, type="B")),
            ["b: with 'b' 5 A devices are promised, the cluster has 4"],
        ),
        (
            (queue("a", cpus=9), queue("b", cpus=8)),
            (node("n", 0),),
            ["b: with 'b' 17 CPUs are promised, the cluster has 16"],
        ),
        ((queue("a", gib=65),), (node("n"),), ["a: with 'a' 65GiB of memory are promised, the cluster has 64GiB"]),
        (
            (queue("a", cpus=4, gib=1), queue("a/b", cpus=3), queue("a/c", cpus=2, gib=2)),
            (),
            ["a/c: with 'a/c' 5 CPUs are promised, 'a' is promised 4"],
        ),
        ((queue("a", cpus=3.3), queue("a/b", cpus=1.1), queue("a/c", cpus=2.2)), (), []),
        ((queue("a", 4, type=A), queue("a/b", 8)), (), []),
        (
            (queue("a", 4), queue("a/b", 2, type=A), queue("a/c", 3)),
            (),
            ["a/c: with 'a/c' 5 GPUs are promised, 'a' is promised 4"],
        ),
        (
            (queue("a", 2, cpus=4, most=Res(cpus=3, gpus=2)),),
            (),
            ["a: 4 CPUs are promised to 'a', its limit is 3"],
        ),
        ((queue("a"), queue("b"), queue("a")), (), ["a: 'a' is there twice"]),
        ((queue("a/b/c"), queue("a")), (), ["a/b/c: 'a/b/c' has no parent 'a/b'"]),
        (
            (queue("a b"), queue("a//c")),
            (),
            ["a b: 'a b' is not NAME/NAME/...", "a//c: 'a//c' is not NAME/NAME/...", "a//c: 'a//c' has no parent 'a/'"],
        ),
        ((Queue(path="a", weight=0),), (), ["a: 0 is not above 0"]),
        ((Queue(path="a", min_user_percent=-5.0),), (), ["a: -5 is not between 0 and 100"]),
        ((Queue(path="a", user_limit_factor=-1.0),), (), ["a: -1 is below 0"]),
        ((Queue(path="a", cells=(OwnedCells(level="node", count=-3),)),), (), ["a: 'a' owns -3 of a cell, at least 1"]),
    ],
)
def test_promises_stay_within_the_parent_the_limit_and_the_cluster(
    queues: tuple, nodes: tuple, expected: list[str]
) -> None:
    assert [f"{queues[one.index].path}: {one.message}" for one in broken_rules(queues, nodes)] == expected
