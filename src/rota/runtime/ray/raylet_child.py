"""What a raylet starts in place of Ray's own scripts: a worker at once, and one idle process instead of an agent.

Ray starts a worker by a script that imports Ray to set up a runtime environment, becomes a shell and then the worker,
which imports Ray again: half a second of a core for each process, needed only where such an environment is asked for.

The agent of Ray's dashboard (an HTTP server, metrics, Ray's own jobs: 1.5 s of a core and 90 MB at each start of a
node) serves a dashboard that does not run here. A raylet ends with its agent: the idle process ends with the raylet.

Run as a file, see ``node.py``; it imports only what every Python has loaded or loads in no time.
"""

import os
import select
import sys

AGENT = "agent"
_SETUP = "setup_worker.py"
_ENVIRONMENT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def worker_command(words: list[str]) -> list[str]:
    """The arguments of Python that start a worker, of those that the raylet gives to Ray's script."""
    if any(word.startswith(_ENVIRONMENT) for word in words):
        worker = next(word for word in words if not word.startswith("-"))
        return [f"{worker.rpartition('/')[0]}/{_SETUP}", *words]
    return [word for word in words if not word.startswith(_LANGUAGE)]


def wait_for_end_of(parent: int) -> None:
    """Until this process has another parent: that one is gone, maybe before this is called."""
    try:
        gone = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() != parent:
        return
    poller = select.poll()
    poller.register(gone, select.POLLIN)
    poller.poll()


if __name__ == "__main__":
    if sys.argv[1] == AGENT:
        wait_for_end_of(int(os.environ["RAY_RAYLET_PID"]))
    else:
        os.execv(sys.executable, [sys.executable, *worker_command(sys.argv[1:])])
