"""rota cp and export: files of a job's output folder, from whichever machine has them, and its trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags
from rota.service.cli.output import Table
from rota.service.copy import split_source
from rota.spec.errors import BadInput

FILES = Table(
    columns={
        "PATH": lambda row: row["path"] + ("/" if row["kind"] == "folder" else ""),
        "BYTES": lambda row: f"{row['bytes']:,}" if row["kind"] == "file" else "",
        "NODE": "node",
    },
    empty="nothing was written there",
    sparse=("NODE",),
)


def cp(
    source: Annotated[str, Parameter(help="JOB:PATH below the output folder of a job; JOB: for all of it.")],
    target: Annotated[str, Parameter(help="A folder, or the name of the copy.")] = ".",
    *,
    node: Annotated[str, Parameter(help="Only from this machine.")] = "",
    list_: Annotated[bool, Parameter(name=["-l", "--list"], help="List what is there; copy nothing.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Copy what a job wrote into $ROTA_OUTPUT_DIR. Folders are copied whole; links are left out.

    Where several machines have different files of one name, choose with --node.

    Examples
    --------
    rota cp hello-1:model.pt .

    rota cp hello-1: --list
    """
    terminal = flags.terminal()
    job, path = split_source(source)
    if list_:
        return flags.answer(lambda client: client.files(job, path, node=node), FILES)
    if not Path(target).parent.is_dir():
        raise BadInput(f"folder {Path(target).parent} does not exist", hint=f"mkdir -p {Path(target).parent}")
    with flags.client() as client:
        done = client.copy(job, path, target, node=node)
    rows = [{**row, "target": str(where)} for row, where in done.files]
    said = {"kind": "Copied", "items": rows, "left_out": list(done.left_out), "notices": list(done.notices)}
    terminal.show(said, lambda _: terminal.line(f"{len(rows)} file{'s' * (len(rows) != 1)}, {done.bytes:,} bytes"))
    for name in done.left_out:
        terminal.note(f"{name} is a link, a socket, or has a name that is not UTF-8: left out")
    for text in done.notices:
        terminal.note(text)
    return 1 if done.notices else 0


def export(
    source: Annotated[str, Parameter(help="Id of a job, or a folder of checkpoints.")],
    *,
    hf: Annotated[Path, Parameter(help="Folder to write.")],
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Write the weights of the newest good checkpoint that training by rota.train.loop.fit has saved.

    The folder has safetensors and config.json, for from_pretrained of transformers; of a model with adapters it has the
    adapters, for peft. Runs where the checkpoints are; the job may still train.

    Examples
    --------
    rota export pretrain-1 --hf llama-tuned
    """
    from rota.service.offline import export_checkpoint

    folder = Path(source) if Path(source).is_dir() else _checkpoints_of(source, flags)
    step = export_checkpoint(folder, hf)
    said = {"kind": "Exported", "step": step, "checkpoints": str(folder), "target": str(hf)}
    flags.terminal().show(said, lambda term: term.line(f"step {step} of {folder} is in {hf}"))
    return 0


def _checkpoints_of(job: str, flags: Flags) -> Path:
    with flags.client() as client:
        document = client.spec(job)
    given = document["spec"].get("checkpoint")
    folder = given.get("dir") if isinstance(given, dict) else None
    return Path(str(folder)) if folder else Path(flags.settings().home) / "checkpoints" / document["job"]
