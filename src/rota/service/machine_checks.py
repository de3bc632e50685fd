"""Checks between the machines of an installation, as findings with remedies: versions, clocks, names, bandwidth."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rota.runtime.packages import installed_version
from rota.service.config import rota_version

if TYPE_CHECKING:
    from rota.service.models.cluster import NodeFinding
    from rota.spec.measured import CheckFacts, MachineFacts, PairFacts

EQUAL = ("python", "ray", "rota")
"""What must be equal: of Python its first two numbers, for what is pickled by one is read by the other."""

SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0
"""Claims on machines allow for clocks that differ by less than a minute; logs of two machines are read side by side."""
SLOW_SHARE = 0.25
"""A pair is slow that is below this share of the fastest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionConflict:
    """A package whose versions differ; ``wanted`` is what to install ``there``."""

    name: str
    there: str
    here: str

    @property
    def wanted(self) -> str:
        """In the words of pip, but for Python itself."""
        return f"Python {compared(self.name, self.here)}" if self.name == "python" else f"{self.name}=={self.here}"


def own_versions() -> dict[str, str]:
    """Versions on this machine by package; empty for one that is not installed."""
    return {
        "python": platform.python_version(),
        "ray": installed_version("ray"),
        "rota": rota_version(),
        "torch": installed_version("torch"),
    }


def compared(name: str, version: str) -> str:
    """The part of a version that must be equal."""
    return ".".join(version.split(".")[:2]) if name == "python" else version


def version_conflicts(there: Mapping[str, str], here: Mapping[str, str]) -> list[VersionConflict]:
    """The packages that two machines must have in one version, and have not."""
    return [
        VersionConflict(name=name, there=there.get(name, ""), here=here.get(name, ""))
        for name in EQUAL
        if compared(name, there.get(name, "")) != compared(name, here.get(name, ""))
    ]


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
