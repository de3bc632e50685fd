"""What the plan verbs do, without a service: read files, ask the planner, give documents."""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NotRequired, TypedDict, cast

import rota
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.runtime.node import local_node
from rota.runtime.process import output_of
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, MissingExtra, RotaError, nearest
from rota.spec.resources import counted
from rota.train.plan.explain import PlanExplanation, explain, least_memory, parse_degrees, why_not
from rota.train.plan.hardware import CPU_TYPE, SHIPPED, Hardware, hardware_from_json, hardware_of_type
from rota.train.plan.importers import from_galvatron, hardware_from_any, model_from_json
from rota.train.plan.memory import GIB
from rota.train.plan.model import ModelShape, ParallelPlan
from rota.train.plan.search import Predicted, Scored, SearchResult, found_to_json, score, search
from rota.train.plan.space import SearchRequest, formats_of, settings

GPUS_TRIED_MAX = 65_536
BATCHES_TRIED_MAX = 1_024
CALIBRATE_S = 300.0
FILE_BYTES_MAX = 16 * 2**20
CHECKOUT = Path(rota.__file__).resolve().parents[2]
"""Root of the checkout, where the package runs from one."""


class ClosestPlan(TypedDict):
    """The plan that needs least memory."""

    plan: JsonObject
    needs_gib: float


class NoPlanHelp(TypedDict):
    """Why no plan fits, and what would help: the fewest devices, or other words."""

    closest: ClosestPlan | None
    smallest_gpus: int | None
    cause: NotRequired[str]
    helps: list[str]


class SearchQuestion(TypedDict):
    """What was asked of the search."""

    model: JsonObject
    hardware: JsonObject
    gpus: int
    memory_gib: float
    batch: int
    pins: Mapping[str, int]
    allow: tuple[str, ...]


class WrittenRunnerUp(TypedDict):
    """A ``RunnerUp`` with its plan in JSON."""

    plan: JsonObject
    iteration_s: float
    slower_pct: float
    why: str


class PlanSearch(TypedDict):
    """``SearchDocument`` with plans in JSON, the question and its time; without a plan what would help."""

    api: str
    kind: str
    plan: JsonObject | None
    certificate: JsonObject
    reason: NotRequired[str]
    predicted: NotRequired[Predicted]
    binds: NotRequired[str]
    notes: NotRequired[list[str]]
    runner_ups: NotRequired[list[WrittenRunnerUp]]
    closest: NotRequired[ClosestPlan | None]
    smallest_gpus: NotRequired[int | None]
    cause: NotRequired[str]
    helps: NotRequired[list[str]]
    question: SearchQuestion
    elapsed_s: float


class PlanCalibration(TypedDict):
    """The hardware that was measured, its figures with their spread, and the file that holds it."""

    api: str
    kind: str
    hardware: JsonObject
    measured: list[JsonObject]
    file: str


class PlanAnswer(PlanExplanation):
    """``PlanExplanation`` with the verdict on other degrees, in JSON."""

    why_not: NotRequired[JsonObject]


def read_json(path: Path, what: str) -> object:
    """The content of a JSON file. Raises BadInput with path, line and column, also for a pipe."""
    try:
        with open(path, "rb", opener=_open_nowait) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadInput(f"{path}: is not a regular file", hint=f"give the path of a {what} file")
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise BadInput(f"{path}: is larger than {FILE_BYTES_MAX} bytes", hint=f"give the path of a {what} file")
        return json.loads(raw.decode())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}", hint=f"give the path of a {what} file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from error


def _open_nowait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def find_hardware(name_or_path: str) -> Hardware:
    """A shipped description by name, or a file: ours or a Calculon system. Raises BadInput naming the known ones."""
    if name_or_path in SHIPPED:
        return SHIPPED[name_or_path]
    path = Path(name_or_path)
    if not path.exists():
        meant = hardware_of_type(name_or_path)
        hint = f"did you mean '{meant.name}'?" if meant else f"shipped: {', '.join(SHIPPED)}"
        raise BadInput(f"hardware: {name_or_path!r} is neither a file nor a shipped name", hint=hint)
    return hardware_from_any(read_json(path, "hardware"))


def hardware_file(folder: Path, kind: str) -> Path:
    """Where an installation keeps the description of a device type. Raises BadInput for what is not a type."""
    if not re.fullmatch(r"[\w.+ -]*\w[\w.+ -]*", kind):
        raise BadInput(f"--type: {kind!r} is not a device type", hint="letters, digits, and . + - _: see rota nodes")
    return folder / f"{kind.lower().replace(' ', '-')}.json"


def measured(name_or_path: str, model: ModelShape) -> tuple[Hardware, ModelShape]:
    """As ``find_hardware``; a folder of Galvatron profiles also gives the memory of the model that was profiled."""
    path = Path(name_or_path)
    if not path.is_dir():
        return find_hardware(name_or_path), model
    files = {one.name: read_json(one, "profile") for one in sorted(path.glob("*.json"))}
    return from_galvatron({name: one for name, one in files.items() if isinstance(one, Mapping)}, model)


def search_document(
    *,
    model: Path,
    hardware: str,
    gpus: int,
    memory_gib: float,
    batch: int,
    pins: str,
    allow: str,
    top: int,
    limit_s: float,
) -> tuple[PlanSearch, tuple[str, ...]]:
    """The ``PlanSearch`` document and warnings. ``plan`` is None when nothing fits."""
    shape, warnings = model_from_json(read_json(model, "model"))
    described, shape = measured(hardware, shape)
    question = SearchRequest(
        model=shape,
        hardware=described,
        gpus=gpus,
        memory_gib=memory_gib,
        batch=batch,
        dtype=formats_of(shape),
        pins=parse_degrees(pins) if pins else {},
        allow=tuple(word.strip() for word in allow.split(",") if word.strip()),
    )
    if top < 1:
        raise BadInput(f"--top: {top} is below 1")
    clock = SystemClock()
    began_s = clock.monotonic_s()
    found = search(question, top=top, stop=lambda: limit_s > 0 and clock.monotonic_s() - began_s > limit_s)
    document = codec.to_json_value(found_to_json(found, question))
    if not found.best and found.certificate.complete:
        document |= _closest(question) if found.certificate.enumerated else _no_setting(question)
    asked: SearchQuestion = {
        "model": codec.to_json_value(shape),
        "hardware": codec.to_json_value(question.hardware),
        "gpus": gpus,
        "memory_gib": memory_gib,
        "batch": batch,
        "pins": question.pins,
        "allow": question.allow,
    }
    taken_s = round(clock.monotonic_s() - began_s, 3)
    return cast("PlanSearch", {**document, "question": asked, "elapsed_s": taken_s}), warnings


def _closest(question: SearchRequest) -> NoPlanHelp:
    """What would help: the plan that needs least memory, and the fewest devices on which something fits."""
    enough = search(replace(question, memory_gib=1e9), top=1).best
    closest: ClosestPlan | None = None
    if enough:
        least = least_memory(question)
        closest = {"plan": codec.to_json_value(least.plan), "needs_gib": least.memory_bytes / GIB}
    gpus = question.gpus * 2
    while gpus <= GPUS_TRIED_MAX:
        if search(replace(question, gpus=gpus, batch=max(question.batch, gpus)), top=1).best:
            return {
                "closest": closest,
                "smallest_gpus": gpus,
                "helps": [counted(gpus, "device"), "a device with more memory"],
            }
        gpus *= 2
    return {"closest": closest, "smallest_gpus": None, "helps": ["a device with more memory"]}


def _no_setting(question: SearchRequest) -> NoPlanHelp:
    """Why no setting exists, whatever the memory: the nearest batches, or the pins, that would make one."""
    pinned = ",".join(f"{name}={value}" for name, value in question.pins.items())
    cause = f"no plan takes {counted(question.batch, 'sequence')} on {counted(question.gpus, 'device')}" + (
        pinned and f" with {pinned}"
    )
    near = (range(question.batch + way, question.batch + way * BATCHES_TRIED_MAX, way) for way in (1, -1))
    batches = [next((one for one in side if _has_setting(replace(question, batch=one))), None) for side in near]
    others = {name: {key: value for key, value in question.pins.items() if key != name} for name in question.pins}
    helps = [f"batch {one}" for one in batches if one]
    if helps and question.batch % (dp := question.pins.get("dp", 1)):
        cause = f"batch {question.batch} is not divisible by dp {dp}"
    helps += [f"{name} not pinned" for name, pins in others.items() if _has_setting(replace(question, pins=pins))]
    return {"closest": None, "smallest_gpus": None, "cause": cause, "helps": helps or ["other pins or devices"]}


def _has_setting(question: SearchRequest) -> bool:
    return question.batch > 0 and any(True for _ in settings(question))


def validate_document(tables: Path, table: str, *, hardware: str = "", calibrate: int = 0, seed: int = 0) -> JsonObject:
    """The ``PlanValidation`` document of one table of a file; ``calibrate`` points are fitted, 0 for none.

    Raises BadInput for a file, table or row that cannot be read, and as ``load_proof``.
    """
    proof = load_proof("validation", "readers of published tables")
    raw = read_json(tables, "table")
    rows = raw.get("tables") if isinstance(raw, Mapping) else raw
    if not isinstance(rows, list):
        raise BadInput(f"{tables}: expected a list of tables, or an object with the key 'tables'")
    names = [str(one["id"]) for one in rows if isinstance(one, Mapping) and "id" in one]
    if table not in names:
        raise BadInput(f"--table {table}: not in {tables}", hint=nearest(table, names, "its tables"))
    return proof.validate(
        rows,
        table,
        hardware=find_hardware(hardware) if hardware else None,
        calibration=proof.Calibration(points=calibrate, seed=seed) if calibrate else None,
    )


def calibrate_document(out: Path | None, *, ranks: int, kind: str) -> PlanCalibration:
    """The ``PlanCalibration`` document; the hardware file that the search reads is written to ``out``.

    Without it the file is that of the device type ``kind`` in the installation, by default the type of this machine.
    """
    if ranks < 1:
        raise BadInput(f"--ranks: {ranks} is below 1")
    if out is None:
        types = dict.fromkeys(device.type for device in local_node().devices) or {CPU_TYPE: None}
        if not kind and len(types) > 1:
            raise BadInput(f"--type: this machine has devices of {' and '.join(types)}", hint="name the one to measure")
        folder = Home.find().hardware
        out = hardware_file(folder, kind or next(iter(types)))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{folder}: {error.strerror or error}", hint="name a file to write") from error
    # a process of its own: torch stays out of this one
    words = [sys.executable, "-m", "rota.train.local_hardware", str(ranks)]
    printed = output_of(words, timeout_s=CALIBRATE_S)
    if printed is None:
        raise RotaError(
            f"calibrate: {' '.join(words)} failed, or took more than {CALIBRATE_S:g} s",
            hint="run it by itself to see why; it needs torch",
        )
    found: JsonObject = json.loads(printed)
    try:
        out.write_text(json.dumps(found["hardware"], indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{out}: {error.strerror or error}", hint="give a path that can be written") from error
    return cast("PlanCalibration", {"api": "rota/v1", "kind": "PlanCalibration", **found, "file": str(out)})


def load_plan(path: Path) -> tuple[ParallelPlan, JsonObject]:
    """A plan from a plan file or a search result, and the whole content."""
    raw = read_json(path, "plan")
    content: JsonObject = raw if isinstance(raw, dict) else {}
    return ParallelPlan.from_json(json.dumps(raw)), content


def explain_document(path: Path, *, model: Path | None, hardware: str, degrees: str) -> PlanAnswer:
    """The ``PlanExplanation`` document; ``degrees`` (``tp=8,pp=1``) adds ``why_not``."""
    plan, raw = load_plan(path)
    question = _question(plan, raw.get("question"), model, hardware)
    found: SearchResult | None = search(question) if raw.get("question") else None
    document: dict[str, object] = {**explain(plan, question, found=found)}
    if degrees:
        best: Scored = score(plan, question)
        pins = parse_degrees(degrees)
        document["why_not"] = {"degrees": pins, **why_not(pins, best, question)}
    return codec.to_json_value(document)


def _question(plan: ParallelPlan, asked: object, model: Path | None, hardware: str) -> SearchRequest:
    given: JsonObject | None = asked if isinstance(asked, dict) else None
    if model is None and given is None:
        raise BadInput("--model: a bare plan does not say which model it is for", hint="give --model and --hardware")
    known = given or {}
    source = read_json(model, "model") if model else known["model"]
    shape, _ = model_from_json(source)
    described = find_hardware(hardware) if hardware else None
    if described is None:
        described = find_hardware("") if given is None else hardware_from_json(known["hardware"])
    return SearchRequest(
        model=shape,
        hardware=described,
        gpus=known.get("gpus", plan.mesh.world),
        memory_gib=known.get("memory_gib", described.device.memory_gib),
        batch=known.get("batch", plan.global_batch),
        dtype=plan.dtype,
        pins=dict(known.get("pins", {})),
        allow=tuple(known.get("allow", ())),
    )


def load_proof(name: str, what: str) -> ModuleType:
    """The module ``tests.proof.NAME`` of a development checkout (decision 0037); ``what`` it holds is for the message.

    Raises MissingExtra (exit status 2) in an installation without a checkout.
    """
    if not (CHECKOUT / "tests" / "proof" / "__init__.py").is_file():
        raise MissingExtra(
            f"{what} are not part of an installed package: {CHECKOUT} has no folder tests/proof",
            hint="clone the repository, run make setup there, and run this command with its .venv/bin/rota",
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module(f"tests.proof.{name}")
