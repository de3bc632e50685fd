"""Hardware that a role is planned for: what its nodes have, by files of the installation or shipped descriptions."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from rota.runtime.node import local_node
from rota.service.plans import find_hardware, hardware_file
from rota.spec.errors import BadInput, Infeasible
from rota.spec.job import RoleSpec
from rota.spec.resources import Health, Node, types_of
from rota.train.plan.hardware import A100_80G_DGX, CPU_TYPE, SHIPPED, Hardware, cpu_ranks, hardware_of_type
from rota.train.plan.memory import GIB

PROCESS_BYTES = 512 * 2**20
"""Memory of a rank beside what its plan counts: interpreter, libraries, context of the device, buffers of links."""


@dataclass(frozen=True, slots=True)
class PlannedDevices:
    """The nodes that roles are planned for, and the folder of calibrated descriptions, one file a device type."""

    nodes: tuple[Node, ...] = ()
    folder: Path | None = None

    @staticmethod
    def of(nodes: Iterable[Node], folder: Path | None = None) -> PlannedDevices:
        """Those of the nodes that may come to run something."""
        return PlannedDevices(tuple(one for one in nodes if one.health is not Health.BAD), folder)

    def types(self) -> dict[str, int]:
        """Device types to the least memory of a device in bytes, 0 where it is unknown."""
        found: dict[str, int] = {}
        for device in (device for node in self.nodes for device in node.devices):
            found[device.type] = min(found.get(device.type, device.memory_bytes), device.memory_bytes)
        return found

    def described(self, kind: str, memory_bytes: int) -> Hardware | None:
        """The calibrated description of a type, else the shipped one, None where both are missing.

        A calibrated file says nothing of links beyond a node unless it has levels for them: those are the shipped ones.
        """
        shipped = hardware_of_type(kind, memory_bytes)
        file = hardware_file(self.folder, kind) if self.folder is not None else None
        if file is None or not file.exists():
            return shipped
        own = find_hardware(str(file)).with_memory(memory_bytes / GIB or inf)
        outer = shipped.levels[1:] if shipped is not None and len(own.levels) == 1 else ()
        return replace(own, name=f"{kind}, as calibrated", levels=(*own.levels, *outer))

    def ranks_on_a_node(self, role: RoleSpec, local: int, ranks: int) -> int:
        """The most consecutive ranks a group may have so that empty nodes hold all ``ranks`` in whole groups; 0: none.

        ``local`` ranks are one instance of the role.
        """
        kinds = types_of(role.res.gpu_type) or tuple(self.types())
        room = [
            int(sum(device.type == kind for device in node.devices) // role.res.gpus) * local
            for node in self.nodes
            for kind in kinds
        ]
        sizes = range(min(max(room, default=0), ranks), 0, -1)
        return next((size for size in sizes if sum(one // size * size for one in room) >= ranks), 0)

    def for_ranks(self, hardware: Hardware, role: RoleSpec, local: int, ranks: int) -> Hardware:
        """The same with no more ranks in its innermost unit than the nodes hold; without known nodes, as it was."""
        inner, rest = hardware.levels[0], hardware.levels[1:]
        most = self.ranks_on_a_node(role, local, ranks) if role.res.gpus else 0
        if not most or (inner.size is not None and inner.size <= most):
            return hardware
        if inner.size is None and most >= ranks:
            return hardware
        return replace(hardware, levels=(replace(inner, size=most), *(rest or (replace(inner, size=None),))))

    def of_role(self, role: RoleSpec, named: str, local: int, workdir: str) -> tuple[Hardware, str]:
        """What the file ``named`` has, else the description of devices that the role may get, and what to say of it.

        Of several types the plan is for those with the least memory, so that it fits all. Raises BadInput for a type
        without a description, where the role names it.
        """
        if named:
            return find_hardware(named if named in SHIPPED else str(own_file(named, workdir))), ""
        if not role.res.gpus:
            return self._of_cpus(role, local)
        there, asked = self.types(), types_of(role.res.gpu_type)
        found = {kind: self.described(kind, there.get(kind, 0)) for kind in asked or there}
        known = [one for one in found.values() if one is not None]
        unknown = " and ".join(kind for kind, one in found.items() if one is None)
        if asked and unknown:
            raise BadInput(
                f"devices of type {unknown} have no description",
                hint=f"run rota plan calibrate on a node that has them, or name model.hardware: {', '.join(SHIPPED)}",
            )
        if unknown or not known:
            least = min((size / GIB for size in there.values() if size), default=inf)
            why = f"{unknown} devices have no description" if unknown else "the cluster has no devices yet"
            return A100_80G_DGX.with_memory(least), (
                f" The role names no gpu_type and {why}: planned for {A100_80G_DGX.name}; run rota plan calibrate on a "
                "node that has them, or name gpu_type or model.hardware."
            )
        chosen = min(known, key=lambda one: (one.device.memory_gib, one.device.peak_tflops["bf16"]))
        if len(found) == 1:
            return chosen, f" Planned for {chosen.name}."
        return (
            chosen,
            f" Planned for {chosen.name}, which has the least memory of {' and '.join(found)}: it fits them all.",
        )

    def _of_cpus(self, role: RoleSpec, local: int) -> tuple[Hardware, str]:
        """Processes on cores: the memory that the role asks, else that of the largest node."""
        most = max((node.memory_bytes for node in self.nodes), default=0) or local_node().memory_bytes
        plain = cpu_ranks((role.res.memory_bytes or most) / GIB, local)
        own = self.described(CPU_TYPE, 0)
        if own is None:
            return plain, ""
        memory = {"memory_gib": plain.device.memory_gib, "reserve_gib": plain.device.reserve_gib}
        level = replace(own.levels[0], size=local)
        return replace(own, device=replace(own.device, **memory), levels=(level,)), f" Planned for {own.name}."


def on_large_devices(role: RoleSpec, devices: PlannedDevices, rank_bytes: float) -> RoleSpec:
    """The role without device types that are too small for its plans, of which the fullest rank needs ``rank_bytes``.

    Raises Infeasible when no device of the cluster has that much.
    """
    if not role.res.gpus:
        return role
    there = devices.types()
    kinds = [kind for kind in types_of(role.res.gpu_type) or there if kind in there]
    large = [kind for kind in kinds if not there[kind] or there[kind] >= rank_bytes + PROCESS_BYTES]
    if kinds and not large:
        sizes = ", ".join(f"{kind} {there[kind] / GIB:.3g} GiB" for kind in kinds)
        raise Infeasible(
            f"roles.{role.name}.plan: its fullest rank needs {rank_bytes / GIB:.3g} GiB, the devices have {sizes}",
            hint="name devices with more memory in resources.gpu_type or model.hardware, or use more of them",
        )
    return role if large == kinds else replace(role, res=replace(role.res, gpu_type="|".join(large)))


def own_file(name: str, workdir: str) -> Path:
    """A file of the job's folder. Raises BadInput for any other: the service opens it, not who asks."""
    path = Path(os.path.normpath(Path(workdir) / name))
    if not workdir or not path.is_relative_to(os.path.normpath(workdir)):
        raise BadInput(f"{name} is not below the folder of the job", hint="put it beside the job file")
    return path
