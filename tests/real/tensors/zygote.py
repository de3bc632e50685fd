"""Forks a fresh process for each piece of code it is told to run, so that a kill test costs milliseconds.

It has numpy and the tensor store (with ``--torch`` torch too) imported but never connects itself. Commands come as JSON
lines: ``{"run": code, "env": {...}, "out": path}`` answers ``{"pid": n}``; ``{"wait": pid}`` answers ``{"status": n}``
(negative: signal).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback

import numpy

import rota.tensors.api.store  # what the children need is imported once
import rota.tensors.errors


def run(code: str, env: dict[str, str], out: str) -> None:
    os.environ.update(env)
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    importlib.reload(rota.tensors.errors)
    status = 0
    try:
        exec(code, {"np": numpy, "os": os, "signal": signal})
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    if status == 0:
        sys.exit(0)  # through atexit: leaves as a well-behaved process does
    os._exit(status)


def main() -> None:
    if "--torch" in sys.argv:
        importlib.import_module("torch")
    for line in sys.stdin:
        command = json.loads(line)
        if "run" in command:
            pid = os.fork()
            if pid == 0:
                os.close(0)
                run(command["run"], command["env"], command["out"])
            print(json.dumps({"pid": pid}), flush=True)
        else:
            _, status = os.waitpid(command["wait"], 0)
            print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


main()
