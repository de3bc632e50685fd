"""rota plan: search, validate, show and explain parallel plans; needs no service, no torch and no device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags
from rota.service.cli.output import Table, Terminal
from rota.spec.errors import BadInput
from rota.spec.resources import counted, parse_size

NOTHING_FITS = 4
BAR_WIDTH = 30
ROUNDING_S = 1e-12
"""A part of a step below this is what sums of floating-point numbers leave, in seconds."""


def search(
    *,
    model: Annotated[Path, Parameter(help="Model file: native, Hugging Face config.json or Calculon.")],
    hardware: Annotated[str, Parameter(help="Shipped name or hardware file.", show_default=True)] = "a100-80g-dgx",
    gpus: Annotated[int, Parameter(help="Number of devices.")],
    memory: Annotated[str, Parameter(help="Memory of one device: 80GiB; a number alone is GiB.")],
    batch: Annotated[int, Parameter(help="Sequences per step.")],
    pin: Annotated[str, Parameter(help="Fixed degrees, e.g. tp=8,zero=1.")] = "",
    allow: Annotated[str, Parameter(help="Extend the search: cp (for short sequences), offload.")] = "",
    top: Annotated[int, Parameter(help="Number of plans to list.")] = 5,
    limit_s: Annotated[float, Parameter(help="Time limit in seconds; 0 searches until proven.")] = 0.0,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Find the best plan of a model on given devices, with a proof. Exit status 4 when nothing fits.

    Examples
    --------
    rota plan search --model llama-7b.json --gpus 8 --memory 36GiB --batch 16
    """
    from rota.service.plans import search_document

    terminal = flags.terminal()
    memory_gib = _gib(memory)
    document, warnings = search_document(
        model=model,
        hardware=hardware,
        gpus=gpus,
        memory_gib=memory_gib,
        batch=batch,
        pins=pin,
        allow=allow,
        top=top,
        limit_s=limit_s,
    )
    for warning in warnings:
        terminal.note(f"warning: {warning}")
    terminal.show(document, lambda term: _found(term, document, memory_gib))
    return 0 if document["plan"] is not None else NOTHING_FITS


def _gib(text: str) -> float:
    """``80GiB`` or ``80`` in GiB. Raises BadInput."""
    try:
        return float(text)
    except ValueError:
        pass  # perhaps with a unit
    try:
        return parse_size(text) / 2**30
    except ValueError as exc:
        raise BadInput(f"--memory {text}: {exc}") from None


def _found(term: Terminal, doc: Mapping[str, Any], memory_gib: float) -> None:
    proof = doc["certificate"]
    if doc["plan"] is None and doc["reason"] == "timed_out":
        term.line("no plan was found in time; give --limit-s more")
        return
    if doc["plan"] is None:
        term.line(doc.get("cause") or f"no plan fits in {memory_gib} GiB a device")
        if doc.get("closest"):
            term.line(f"the closest needs {doc['closest']['needs_gib']:.3g} GiB")
        term.line(f"what would help: {', '.join(doc['helps'])}")
        return
    predicted = doc["predicted"]
    rows = [(_choices(doc["plan"]), predicted["iteration_s"], "")]
    rows += [(_choices(one["plan"]), one["iteration_s"], one["why"]) for one in doc["runner_ups"]]
    differ = [name for name in rows[0][0] if len({choices[name] for choices, _, _ in rows}) > 1]
    term.line(f"plan: {_words({name: choice for name, choice in rows[0][0].items() if name not in differ})}")
    Table(columns={name: name for name in (*differ, "step s", "why slower")}).print(
        term, [{**choices, "step s": f"{step_s:.4g}", "why slower": why} for choices, step_s, why in rows]
    )
    for note in doc["notes"]:
        term.line(note)
    used = predicted["memory_gib"]
    filled = min(BAR_WIDTH, round(BAR_WIDTH * used / memory_gib))
    term.line(f"memory  [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {used:.3g} of {memory_gib:.3g} GiB")
    peak = f"{predicted['mfu_pct']:.3g} % of the peak of {doc['question']['hardware']['name']}"
    term.line(f"{predicted['samples_per_s']:.4g} sequences/s, {peak}; binds: {doc['binds']}")
    state = "complete" if proof["complete"] else "stopped by its limit"
    term.line(
        f"proof: bound {proof['lower_bound_s']:.4g} s, gap {proof['gap_pct']:.3g} %, {proof['scored']} of "
        f"{proof['enumerated']} settings scored, {state}, {doc['elapsed_s']} s"
    )


def _choices(plan: Mapping[str, Any]) -> dict[str, str]:
    """Everything that a plan chooses, by name; where its layers differ, each choice with its number of layers."""
    mesh, layers = plan["mesh"], plan["layers"]

    def of_layers(name: str) -> str:
        counts: dict[str, int] = {}
        for one in layers:
            choice = {True: "yes", False: "no"}[one[name]] if name == "sp" else str(one[name])
            counts[choice] = counts.get(choice, 0) + one["count"]
        return " ".join(f"{choice}*{n}" if len(counts) > 1 else choice for choice, n in counts.items())

    sizes = [str(stage["layers"][1] - stage["layers"][0]) for stage in plan["stages"]]
    return {
        **{name: str(size) for name, size in mesh.items()},
        **{name: of_layers(name) for name in ("sp", "zero", "recompute", "offload")},
        "schedule": plan["schedule"],
        "chunks": str(max(stage["chunk"] for stage in plan["stages"]) + 1),
        "stages": " ".join(sizes) if len(set(sizes)) > 1 else "",
        "micro_batch": str(plan["micro_batch"]),
        "sync": plan["sync"]["mode"],
    }


def _words(choices: Mapping[str, str]) -> str:
    """The choices that are not the plain ones."""
    return ", ".join(f"{name} {choice}" for name, choice in choices.items() if choice not in ("", "1", "none", "no"))


def validate(
    tables: Annotated[Path, Parameter(help="JSON file with published tables.")],
    *,
    table: Annotated[str, Parameter(help="Id of the table.")],
    hardware: Annotated[str, Parameter(help="Shipped name or hardware file, instead of the table's own.")] = "",
    calibrate: Annotated[int, Parameter(help="Number of rows of other groups to fit to.")] = 0,
    seed: Annotated[int, Parameter(help="Seed for the choice of these rows.")] = 0,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Compare the cost model with a published table. Needs a development checkout.

    Examples
    --------
    rota plan validate tables.json --table megatron_seqpar_table5
    """
    from rota.service.plans import validate_document

    given = {"calibrate": calibrate, "seed": seed}
    return flags.show(lambda: validate_document(tables, table, hardware=hardware, **given), _validation)


def _validation(term: Terminal, doc: Mapping[str, Any]) -> None:
    VALIDATED(term, doc)
    if doc["mean_pct"] is not None:
        term.line(f"mean {doc['mean_pct']:.2f} %, max {doc['max_pct']:.2f} %")
    if regret := doc["regret"]:
        term.line(
            f"the configuration picked was slower than the best of its group by {regret['mean_pct']:.2f} % in the "
            f"mean, {regret['max_pct']:.2f} % at most ({regret['groups']} groups)"
        )
    for peer, found in doc["peers"].items():
        term.line(f"{peer}: {', '.join(f'{name} {value}' for name, value in found.items())}")
    if fitted := doc["calibration"]:
        MULTIPLIERS.print(term, [{"name": name, **one} for name, one in fitted["multipliers"].items()])


VALIDATED = Table(
    columns={
        "row": "row",
        "quantity": "quantity",
        "published": "published",
        "predicted": lambda row: f"{row['predicted']:.5g}",
        "error %": lambda row: f"{row['error_pct']:+.2f}",
    },
    rows=lambda doc: doc["rows"],
)
MULTIPLIERS = Table(
    columns={
        "part": "name",
        "multiplier": lambda one: f"{one['mean']:.3f}",
        "over fits without one group": lambda one: f"{one['low']:.3f} to {one['high']:.3f}",
    }
)
MEASURED = Table(
    columns={
        "measured": "name",
        "median": lambda one: f"{one['value']:.4g}",
        "quartiles": lambda one: f"{one['low']:.4g} to {one['high']:.4g}",
    },
    rows=lambda doc: doc["measured"],
)


def calibrate(
    out: Annotated[
        Path | None, Parameter(help="Hardware file to write; default: that of the device type in the installation.")
    ] = None,
    *,
    type: Annotated[str, Parameter(help="Device type that is measured; default: that of this machine.")] = "",
    ranks: Annotated[int, Parameter(help="Processes for the all-reduce; 1: none.")] = 1,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Measure this machine and write the hardware file that plan search reads. Needs torch.

    Without OUT every later job with plan: auto on devices of that type is planned with what was measured.

    Examples
    --------
    rota plan calibrate
    rota plan calibrate here.json --ranks 2
    """
    from rota.service.plans import calibrate_document

    return flags.show(lambda: calibrate_document(out, ranks=ranks, kind=type), MEASURED)


def show(file: Path, *, flags: Flags = DEFAULT_FLAGS) -> int:
    """Print a plan: mesh, stages, runs of layers. With --json the canonical plan.

    Examples
    --------
    rota plan show plan.json
    """
    import json

    from rota.service.plans import load_plan

    loaded, _ = load_plan(file)
    terminal = flags.terminal()
    if terminal.json:
        terminal.line(loaded.to_json())
        return 0
    raw = json.loads(loaded.to_json())
    terminal.line(f"plan {loaded.id}: {_words(_choices(raw))}")
    for stage in raw["stages"]:
        ends = " ".join(name for name in ("embed", "head") if stage[name])
        terminal.line(
            f"  stage layers {stage['layers'][0]}..{stage['layers'][1]} chunk {stage['chunk']} {ends}".rstrip()
        )
    for layer in raw["layers"]:
        terminal.line(
            f"  {counted(layer['count'], 'layer')}: tp {layer['tp']}, sp {layer['sp']}, zero {layer['zero']}, "
            f"recompute {layer['recompute']}, offload {layer['offload']}"
        )
    return 0


def explain(
    file: Annotated[Path, Parameter(help="Result of plan search, or a plan.")],
    *,
    model: Annotated[Path | None, Parameter(help="Model file, for a bare plan.")] = None,
    hardware: Annotated[str, Parameter(help="Shipped name or hardware file, for a bare plan.")] = "",
    why_not: Annotated[str, Parameter(help="Degrees to compare with, e.g. tp=8,pp=1.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Explain what limits a plan, its time and memory, and why another choice is worse.

    Examples
    --------
    rota plan explain found.json --why-not tp=8,pp=1
    """
    from rota.service.plans import explain_document

    document = explain_document(file, model=model, hardware=hardware, degrees=why_not)
    flags.terminal().show(document, lambda term: _explained(term, document))
    return 0


def _explained(term: Terminal, doc: Mapping[str, Any]) -> None:
    for sentence in doc["summary"]:
        term.line(sentence)
    term.line(f"binds: {doc['binds']}")
    seconds = {name: s if abs(s) > ROUNDING_S else 0.0 for name, s in doc["breakdown_s"].items()}
    SHARES.print(term, [(name, s, 100 * s / sum(seconds.values())) for name, s in seconds.items()])
    MEMORY.print(term, doc["memory_gib_by_class"].items())
    if "why_not" in doc:
        answer = doc["why_not"]
        asked = ", ".join(f"{name}={value}" for name, value in answer["degrees"].items())
        term.line(f"why not {asked}: {answer['verdict'].replace('_', ' ')}: {'; '.join(answer['because'])}")


SHARES = Table(columns={"part": lambda row: row[0], "s": lambda row: f"{row[1]:.4g}", "%": lambda row: f"{row[2]:.1f}"})
MEMORY = Table(columns={"memory": lambda row: row[0], "GiB": lambda row: f"{row[1]:.4g}"})
