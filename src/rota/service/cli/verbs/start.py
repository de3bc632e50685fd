"""rota init and completion: a job to begin with, and the shell's Tab key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags
from rota.service.cli.output import Table
from rota.service.cli.shell import own_shell
from rota.service.templates import about, template_files, template_names
from rota.spec.errors import BadInput, Conflict, unknown


def init(
    template: Annotated[str, Parameter(help="ddp, torchrun, sft, ppo, online, multimodal, notebook.")] = "",
    *,
    dir_: Annotated[Path | None, Parameter(name="--dir", help="Where to put it; default: ./TEMPLATE.")] = None,
    force: Annotated[bool, Parameter(help="Overwrite existing files.")] = False,
    list_: Annotated[bool, Parameter(name="--list", help="Show the templates.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Write a job file with its code, ready to run and to change.

    Examples
    --------
    rota init ppo --dir my-first-job
    """
    terminal = flags.terminal()
    names = template_names()
    if list_ or not template:
        rows = [{"name": name, "text": about(name)} for name in names]
        document = {"kind": "TemplateList", "items": rows, "next": None}
        return flags.show(lambda: document, Table(columns={"TEMPLATE": "name", "WHAT": "text"}))
    if template not in names:
        raise unknown(f"no template {template!r}", template, names, "templates")
    folder = (dir_ or Path(template)).expanduser()
    files = template_files(template)
    taken = [name for name in files if (folder / name).exists()]
    if taken and not force:
        raise Conflict(f"{folder / taken[0]} is there already", hint="choose another --dir, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            here = text.replace("rota run job.yaml", f"rota run {folder / 'job.yaml'}")
            (folder / name).write_text(here, encoding="utf-8")
    except OSError as exc:
        raise BadInput(f"{exc.filename}: {exc.strerror}") from exc
    written = [str(folder / name) for name in files]
    listed = {"kind": "FileList", "template": template, "items": written, "next": None}
    terminal.show(listed, lambda term: term.line("\n".join(written)))
    job_file = folder / "job.yaml"
    terminal.note(f"check it: rota run {job_file} --check")
    terminal.note(f"run it: rota run {job_file}")
    for name in (name for name in files if name.endswith(".ipynb")):
        terminal.note(f"or open {folder / name} in Jupyter or an editor")
    terminal.note(f"its fields: change {job_file}, or rota run {job_file} --set roles.NAME.replicas=2")
    return 0


def completion(
    action: Annotated[str, Parameter(help="show, install or uninstall.")] = "show",
    shell: Annotated[str, Parameter(help="bash, zsh or fish; default: that of $SHELL.")] = "",
    *,
    argv: Annotated[list[str] | None, Parameter(show=False)] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show, install or take away the completion of the Tab key.

    Examples
    --------
    rota completion install bash
    """
    from rota.service.cli import completion as tab

    terminal = flags.terminal()
    if action == "words":
        from rota.service.cli.app import VERBS, verb_function

        terminal.line("\n".join(tab.words_for(argv or [], VERBS, verb_function, lambda what: _live(flags, what))))
        return 0
    if action not in ("show", "install", "uninstall"):
        raise BadInput(f"{action!r}: not understood", hint="show, install or uninstall")
    name = shell or own_shell()
    if name not in tab.SCRIPTS:
        raise BadInput(f"no completion for the shell {name!r}", hint=f"name one: {', '.join(tab.SCRIPTS)}")
    if action == "show":
        document = {"kind": "Completion", "shell": name, "script": tab.SCRIPTS[name]}
        terminal.show(document, lambda term: term.line(tab.SCRIPTS[name].rstrip()))
        return 0
    path = (tab.install if action == "install" else tab.uninstall)(name, Path.home())
    done = {"kind": "Completion", "shell": name, "file": str(path), "installed": action == "install"}
    terminal.show(done, lambda term: term.line(str(path)))
    terminal.note("a new shell knows it" if action == "install" else "taken out")
    return 0


def _live(flags: Flags, what: str) -> list[str]:
    """Names of the service for the Tab key; none when it does not answer soon."""
    if what == "templates":
        return template_names()
    from rota.service.cli.completion import ANSWER_S
    from rota.service.client import Client
    from rota.spec.errors import RotaError

    try:
        with Client(flags.server, flags.token, timeout_s=ANSWER_S) as client:
            if what == "jobs":
                return [job["id"] for job in client.jobs(all=True)["items"]]
            if what == "nodes":
                return [node["id"] for node in client.nodes()["items"]]
            return [queue["path"] for queue in client.queues()["items"]]
    except RotaError:
        return []
