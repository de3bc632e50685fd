"""Inspection of workloads: ``python -m rota.job.inspect`` prints what those of a job declare, as one JSON object.

Standard input: ``{"workdir": "...", "workloads": {role: "module:name"}, "args": {role: {...}}}``. Standard output:
``{role: {"interface": {...}}}`` or ``{role: {"error": text, "traceback": text}}``. Runs as a child process, because it
imports user code; whatever that code prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from threading import local
from types import ModuleType
from typing import TypedDict

from rota.job.health.stacks import error_summary
from rota.job.workload import interface_of
from rota.spec import codec
from rota.spec.check import nearest
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput
from rota.spec.job import STREAM_LOOP, Interface
from rota.spec.user_code import UserCode

MOVED = {STREAM_LOOP: "rota.job.instance.streams:stream_loop"}
"""Import paths that stored jobs name, and where their objects are now."""


def import_target(path: str) -> object:
    """The object of an import path ``module:name``. Raises BadInput for a bad path, or what the import raises."""
    module, sep, name = MOVED.get(path, path).partition(":")
    if not sep or not module or not name:
        raise BadInput(f"{path!r} is not MODULE:NAME, for example train:Policy")
    if module.endswith(".py"):
        meant = module.removesuffix(".py").replace("/", ".")
        raise BadInput(f"{module!r} is the name of a file, not of a module", hint=f"write {meant}:{name}")
    found: object = _imported(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadInput(
                f"module {module!r} has no {name!r}", hint=nearest(part, [one for one in vars(found) if one[0] != "_"])
            )
        found = getattr(found, part)
    return found


class _Begun(BaseException):
    """A module that is imported for what it defines has come to where it submits its job."""


_IMPORTING = local()


def _imported(name: str) -> ModuleType:
    """The module; one that submits its job at its top has what it defined before that."""
    before, _IMPORTING.name = getattr(_IMPORTING, "name", ""), name
    try:
        return importlib.import_module(name)
    except _Begun as end:
        return sys.modules.setdefault(name, end.args[0])
    finally:
        _IMPORTING.name = before


def not_while_imported() -> None:
    """End the import of a module that is imported for what it defines: an instance submits no second job."""
    if name := getattr(_IMPORTING, "name", ""):
        raise _Begun(sys.modules[name])


def use_workdir(workdir: str) -> None:
    """Make ``workdir`` the current folder and the first place to import from."""
    if workdir:
        os.chdir(workdir)
        sys.path.insert(0, workdir)


def inspect_workload(path: str, args: JsonObject) -> Interface:
    """Import a workload and read its interface. Raises what ``import_target`` and ``interface_of`` raise."""
    return interface_of(import_target(path), args)


class Inspection(TypedDict, total=False):
    """What a workload declares, or the error of its import with the traceback.

    ``arguments`` is there when ``args`` of the role are wrong: what is wrong with each, by name;
    what is missing is under the empty name.
    """

    interface: JsonObject
    error: str
    traceback: str
    arguments: dict[str, str]


def inspect_all(workloads: Mapping[str, str], args: Mapping[str, JsonObject]) -> dict[str, Inspection]:
    """The answer for every role, errors included."""
    found: dict[str, Inspection] = {}
    for role, path in workloads.items():
        with UserCode() as imported:
            found[role] = {"interface": codec.to_json_value(inspect_workload(path, args.get(role, {})))}
        if imported.failed:
            error = imported.take()
            text, trace = error_summary(error)
            found[role] = {"error": text, "traceback": trace}
            if isinstance(error, BadInput) and "arguments" in error.fields:
                found[role]["arguments"] = dict(error.fields["arguments"])
    return found


def main() -> None:
    """Read the request from standard input, print the answer."""
    request = json.loads(sys.stdin.read())
    use_workdir(request.get("workdir", ""))
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what the code prints, and whatever it starts
        answer.write(json.dumps(inspect_all(request["workloads"], request.get("args", {}))) + "\n")


if __name__ == "__main__":
    importlib.import_module("rota.job.inspect").main()  # as the module that a job asks whether it is imported
