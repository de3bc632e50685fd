"""Where a machine is and how its devices lie, found and not typed: by Ray's table, a file, /sys and NVLink."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rota.spec.errors import BadInput

LEVELS = ("region", "zone", "rack")
"""Enclosing cells from the outside in."""
LABELS: Mapping[str, tuple[str, ...]] = {
    "region": ("region", "ray.io/availability-region", "topology.kubernetes.io/region"),
    "zone": ("zone", "ray.io/availability-zone", "topology.kubernetes.io/zone"),
    "rack": ("rack", "topology.kubernetes.io/rack", "topology.rota/rack"),
}
"""Labels of Ray's table that say where a machine is, the strongest first; KubeRay passes those of Kubernetes on."""
FILE = "topology.yaml"
IDENTITY = "rota-identity"
"""Label of a machine: its boot and network, which differ between machines of one name."""
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLocation:
    """Cells around a machine from the outside in, and its labels."""

    cells: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()


def locate(name: str, labels: Mapping[str, str], topology: Mapping[str, Mapping[str, str]]) -> NodeLocation:
    """Where a machine is, by the labels of its row in Ray's table; what the topology file says of its name wins."""
    found = {level: next((labels[key] for key in LABELS[level] if labels.get(key)), "") for level in LEVELS}
    found |= {level: value for level, value in topology.get(name, {}).items() if level in LEVELS}
    there = {level: value for level, value in found.items() if value}
    own = {key: value for key, value in labels.items() if not key.startswith("ray.io/") and key != IDENTITY}
    return NodeLocation(
        cells=tuple(there[level] for level in LEVELS if level in there), labels=tuple(sorted((own | there).items()))
    )


def read_topology(path: Path) -> dict[str, dict[str, str]]:
    """Levels of each machine by its name, from ``NAME: {zone: a, rack: r1}``; empty without one. Raises BadInput."""
    try:
        found = YAML(typ="safe").load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise BadInput(f"{path}: {error}", hint="repair it: NAME: {zone: a, rack: r1}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: not a map of machines", hint="write NAME: {zone: a, rack: r1}")
    for name, levels in found.items():
        if not isinstance(levels, dict) or not set(levels) <= set(LEVELS):
            hint = f"write {name}: {{zone: a, rack: r1}}; of {', '.join(LEVELS)}"
            raise BadInput(f"{path}: {name}: {levels}", hint=hint)
    return {str(name): {str(key): str(value) for key, value in levels.items()} for name, levels in found.items()}


def numa_nodes(buses: tuple[str, ...], root: Path = PCI) -> tuple[int, ...]:
    """NUMA node of each device by its PCI address; -1 where the kernel does not say."""
    found: list[int] = []
    for bus in buses:
        try:
            found.append(int((root / f"{bus}.0" / "numa_node").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            found.append(-1)
    return tuple(found)


def nvlink_islands(table: str) -> tuple[int, ...]:
    """Per device, the first one with which NVLink connects it, from what ``nvidia-smi topo -m`` prints; -1 for none.

    A cell of the table is ``NV`` and a number of links where NVLink connects two devices, else the way over PCIe.
    """
    lines = (line.split() for line in table.splitlines())
    rows = [words[1:] for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]
    found: list[int] = []
    for own, cells in enumerate(rows):
        linked = [other for other, cell in enumerate(cells[: len(rows)]) if re.fullmatch(r"NV\d+", cell)]
        found.append(min(own, *linked) if linked else -1)
    return tuple(found)


def sockets_of(places: tuple[int, ...]) -> int:
    """Into how many equal consecutive parts devices in the order of their addresses fall; 1 if they do not.

    ``places`` has the NUMA node of each, or its island of NVLink; -1 where that is not known.
    """
    count = len(dict.fromkeys(places))
    if count < 2 or len(places) % count or -1 in places:
        return 1
    size = len(places) // count
    parts = [set(places[start : start + size]) for start in range(0, len(places), size)]
    return count if all(len(part) == 1 for part in parts) else 1
