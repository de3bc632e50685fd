"""rota tensors: which bytes are shared under which name, who holds them, and whether all is well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs.formatting import amount, lasting, size
from rota.spec.resources import counted

NAMESPACE = Annotated[str, Parameter(name=["-n", "--namespace"], help="Namespace; default: the one of all jobs.")]


def ls(
    prefix: Annotated[str, Parameter(help="Only names with this prefix.")] = "",
    *,
    namespace: NAMESPACE = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """List the named tensors of this machine.

    Examples
    --------
    rota tensors ls weights/
    """
    from rota.service.tensor_documents import tensor_list

    return flags.show(lambda: tensor_list(prefix, namespace=namespace), TENSORS)


TENSORS = Table(
    columns={
        "NAME": "name",
        "VERSION": "version",
        "STEP": "step",
        "DTYPE": lambda one: one["dtype"] or one["kind"],
        "SHAPE": lambda one: "x".join(map(str, one["shape"] or ())),
        "BYTES": lambda one: size(one["bytes"]),
        "LEASES": "leases",
        "OWNER": "owner",
        "STATE": "state",
        "AGE": lambda one: lasting(one["age_s"]),
    },
    empty="no tensors",
    extra=("AGE", "STEP", "OWNER"),
)


def stat(
    name: Annotated[str, Parameter(help="Name of the tensor.")],
    *,
    namespace: NAMESPACE = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show one tensor, its versions and who holds them.

    Examples
    --------
    rota tensors stat weights/ppo-3/actor-rollout
    """
    from rota.service.tensor_documents import tensor

    return flags.show(lambda: tensor(name, namespace=namespace), _one)


def _one(term: Terminal, doc: Mapping[str, Any]) -> None:
    term.pairs((name, value) for name, value in doc.items() if name not in ("api", "kind", "versions"))
    for version in doc["versions"]:
        leases = counted(version["leases"], "lease")
        term.line(f"version {version['version']} {version['state']}: {size(version['bytes'])}, {leases}")
        for holder in version["holders"]:
            term.line(
                "  held by " + ", ".join(f"{name} {value}" for name, value in holder.items() if value is not None)
            )


def top(
    count: Annotated[int, Parameter(help="Maximum number of names to list.")] = 20,
    *,
    namespace: NAMESPACE = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show the names that take the most bytes, old versions that are still read included.

    Examples
    --------
    rota tensors top 5
    """
    from rota.service.tensor_documents import tensor_top

    return flags.show(lambda: tensor_top(max(1, count), namespace=namespace), LARGEST)


LARGEST = Table(
    columns={
        "NAME": "name",
        "BYTES": lambda one: size(one["bytes"]),
        "ONLY HELD BY OLD READERS": lambda one: size(one["doomed_bytes"]),
        "VERSIONS": "versions",
        "LEASES": "leases",
    },
    empty="no tensors",
)


def doctor(*, namespace: NAMESPACE = "", flags: Flags = DEFAULT_FLAGS) -> int:
    """Check the tensor store of this machine, and say what to do; exits with 1 when something fails.

    Examples
    --------
    rota tensors doctor
    """
    from rota.service.tensor_documents import tensor_doctor

    return flags.show(lambda: tensor_doctor(namespace=namespace), _checks, _fails)


def _fails(document: Mapping[str, Any]) -> bool:
    return any(one["level"] == "fail" for one in document["checks"])


def _checks(term: Terminal, document: Mapping[str, Any]) -> None:
    checks = document["checks"]
    width = max((len(one["name"]) for one in checks), default=0)
    for one in checks:
        mark = one["level"] if one["level"] == "ok" else one["level"].upper()
        term.line(f"{mark:<4}  {one['name']:<{width}}  {one['value']}")
        if one["remedy"]:
            term.line(f"{'':<{width + 8}}{one['remedy']}")


def gc(
    *,
    dry_run: Annotated[bool, Parameter(help="Only show what would be removed.")] = False,
    every: Annotated[bool, Parameter(name="--all", negative="", help="All namespaces of this registry.")] = False,
    namespace: NAMESPACE = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Sweep what dead processes left and give free memory back.

    Examples
    --------
    rota tensors gc --all --dry-run
    """
    from rota.service.tensor_documents import tensor_gc

    terminal = flags.terminal()
    document = tensor_gc(namespace=namespace, dry_run=dry_run, every=every)
    would = "would give" if dry_run else "gave"
    given = size(document["trimmed_bytes"]) or "nothing"
    text = f"swept {counted(document['swept'], 'dead client')}, {would} {given} back"
    terminal.show(document, lambda term: term.line(document.get("text") or text))
    return 0


def fsck(
    *,
    repair: Annotated[bool, Parameter(help="Repair what can be repaired.")] = False,
    namespace: NAMESPACE = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Check the invariants of the registry and the shared memory; exits with 1 when one is broken.

    Examples
    --------
    rota tensors fsck --json
    """
    from rota.service.tensor_documents import tensor_fsck

    return flags.show(lambda: tensor_fsck(namespace=namespace, repair=repair), _fsck, _broken)


def _broken(document: Mapping[str, Any]) -> bool:
    return not all(one["repaired"] for one in document["violations"])


def _fsck(term: Terminal, doc: Mapping[str, Any]) -> None:
    for one in doc["violations"]:
        term.line(f"{one['rule']} {one['object']}: {one['detail']}{' (repaired)' if one['repaired'] else ''}")
    if text := doc.get("text"):
        term.line(text)
    term.line(f"{amount(doc['checked'])} checked, {counted(len(doc['violations']), 'violation')}")


def recover(
    *,
    dry_run: Annotated[bool, Parameter(help="Only show what would be restored.")] = False,
    namespace: NAMESPACE = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Build the registry again from what lies in shared memory.

    Examples
    --------
    rota tensors recover
    """
    from rota.service.tensor_documents import tensor_recover

    def show(term: Terminal, doc: Mapping[str, Any]) -> None:
        text = f"{counted(doc['names'], 'name')}, {counted(doc['leases'], 'lease')} in {doc['seconds']} s"
        term.line(doc.get("text") or text)

    return flags.show(lambda: tensor_recover(namespace=namespace, dry_run=dry_run), show)


def door(*, namespace: NAMESPACE = "", flags: Flags = DEFAULT_FLAGS) -> int:
    """Serve create, get and delete to other languages through a Redis list, until interrupted.

    Examples
    --------
    rota tensors door
    """
    from rota.service.tensor_documents import tensor_door

    terminal = flags.terminal()
    served, document = tensor_door(namespace=namespace)
    text = f"commands are taken from {' and '.join(document['lists'])} at {document['url']}; Ctrl-C ends it"
    terminal.show(document, lambda term: term.line(text))
    try:
        served.run()
    except KeyboardInterrupt:
        if not terminal.json:
            terminal.line(f"{counted(served.done, 'command')} done, {served.refused} refused")
    return 0
