"""Checks between machines as findings with remedies, and what a machine does as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rota.service.models.cluster import NodeFinding
from rota.service.versions import EQUAL, compared

if TYPE_CHECKING:
    from rota.spec.measured import CheckFacts, MachineFacts, PairFacts

SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0
"""Claims on machines allow for clocks that differ by less than a minute; logs of two machines are read side by side."""
SLOW_SHARE = 0.25
"""A pair is slow that is below this share of the fastest one."""


def node_findings(facts: CheckFacts) -> list[NodeFinding]:
    """What is wrong between machines, with the command that repairs it; the worst first, then by name."""
    found = [*_silent(facts), *_versions(facts["machines"]), *_pairs(facts)]
    return sorted(found, key=lambda one: (one["mark"] != "fail", one["name"], one["fact"]))


def _finding(name: str, mark: str, fact: str, remedy: str) -> NodeFinding:
    return {"name": name, "mark": mark, "fact": fact, "remedy": remedy}


def _silent(facts: CheckFacts) -> Iterator[NodeFinding]:
    for one in facts["machines"]:
        if one["error"]:
            remedy = f"look there: 'ray status', and rota doctor on {one['node']}"
            yield _finding("machine", "fail", f"{one['node']} does not answer: {one['error']}", remedy)


def _versions(machines: list[MachineFacts]) -> Iterator[NodeFinding]:
    there = [one for one in machines if not one["error"]]
    for name in (*EQUAL, "torch"):
        by_version: dict[str, list[str]] = {}
        for one in there:
            by_version.setdefault(compared(name, one["versions"].get(name, "")), []).append(one["node"])
        if len(by_version) < 2:
            continue
        wanted = max(by_version, key=lambda version: (len(by_version[version]), version))
        texts = [f"{version or 'none'} on {', '.join(nodes)}" for version, nodes in sorted(by_version.items())]
        others = ", ".join(node for version, nodes in by_version.items() if version != wanted for node in nodes)
        how = f"install Python {wanted}" if name == "python" else f"pip install {name}=={wanted}"
        yield _finding(name, "fail" if name in EQUAL else "warn", "; ".join(texts), f"on {others}: {how}")


def _pairs(facts: CheckFacts) -> Iterator[NodeFinding]:
    by_name = {one["node"]: one for one in facts["machines"]}
    fastest = max((one["bytes_per_s"] or 0.0 for one in facts["pairs"]), default=0.0)
    for pair in facts["pairs"]:
        yield from _pair(pair, by_name[pair["target"]], fastest)


def _pair(pair: PairFacts, target: Mapping[str, object], fastest: float) -> Iterator[NodeFinding]:
    between = f"{pair['source']} to {pair['target']}"
    if pair["error"]:
        remedy = f"open TCP ports 1024 to 65535 of {pair['target']} for {pair['source']} in the firewall between them"
        yield _finding("ports", "fail", f"{between}: {pair['error']}", remedy)
        return
    if not pair["resolves"]:
        line = f"{target['address']} {target['host_name']}"
        fact = f"{pair['source']} does not know the name {target['host_name']}"
        yield _finding("name", "warn", fact, f"on {pair['source']}: echo '{line}' >> /etc/hosts")
    if (skew_s := pair["skew_s"]) is not None and abs(skew_s) > SKEW_WARN_S and pair["source"] < pair["target"]:
        mark = "fail" if abs(skew_s) > SKEW_FAIL_S else "warn"
        fact = f"the clock of {pair['target']} is {skew_s:+.2f} s from that of {pair['source']}"
        yield _finding("clock", mark, fact, "on both: systemctl enable --now chronyd; then: chronyc makestep")
    if (speed := pair["bytes_per_s"]) is not None and speed < SLOW_SHARE * fastest:
        fact = f"{between}: {speed / 1e6:.0f} MB/s, the fastest pair has {fastest / 1e6:.0f} MB/s"
        yield _finding("bandwidth", "warn", fact, f"look at cable and card of both: ethtool, ip -s link; on {between}")
