"""Loops that wait: each has a limit in it, or a line here that says what ends it; queues have a size, or a reason.

A loop waits if its condition or its body does; ``while True`` and ``while not done`` are looked at alike.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.banned_words import tree_of

SOURCES = Path(__file__).resolve().parent.parent / "src" / "rota"
LIMIT = re.compile(r"monotonic|deadline|until_s|left_s|timeout|_max\b|_MAX\b|\btries\b")
"""What the condition or the body of a loop names where it ends by time or number."""
WAIT = re.compile(r"sleep|await |\.wait|recv|accept|select|poll|\.take\(|retry")

ENDS: dict[str, tuple[str, ...]] = {
    "a watch: it ends with its task, which its owner cancels, or with its process": (
        "job/instance/instance.py Instance._trace", "job/instance/instance.py Instance._watch_devices",
        "job/instance/spmd.py CommandRunner._follow_progress", "job/instance/streams.py Streams._watch",
        "job/instance/bootstrap.py StepCounter.work", "job/master/master.py JobMaster._watch_silences",
        "runtime/limit_watch.py run", "runtime/ray/launcher.py RayLauncher._until_unplaced",
        "runtime/ray/operations.py keep_warm", "service/cli/verbs/live.py Ticker._run",
        "service/process/joined.py JoinAgent._turns", "service/process/joined.py watch",
        "service/process/tasks.py keep_logs", "service/process/tasks.py keep_snapshot",
        "runtime/ray/client.py GatewayClient._keep", "runtime/ray/client.py GatewayClient._watch",
        "runtime/ray/gateway.py Gateway._watch_engine", "runtime/ray/operations.py GatewayOps._keep",
        "runtime/ray/operations.py GatewayOps._watch",
        "service/process/supervisor.py Supervisor.run", "service/process/tasks.py keep_nodes",
        "service/process/tasks.py show_life", "service/process/tasks.py wait_removed",
        "service/process/tasks.py watch_hangs", "service/process/tasks.py watch_idle",
        "service/process/tasks.py watch_parts", "service/webhooks.py Notifier._serve",
        "service/webhooks.py Notifier.run",
    ),
    "a listener or a connection: it ends with its socket": (
        "runtime/ray/client.py GatewayClient._read_replies", "runtime/ray/gateway.py Gateway._serve",
        "runtime/ray/pairs.py Checker._serve", "runtime/socket_calls.py CallServer._accept_local",
        "runtime/socket_calls.py CallServer._accept_remote", "runtime/socket_calls.py _accepted",
        "service/rest/forward.py Relay.run", "service/rest/routes/terminals.py _frames",
        "runtime/frames.py fill",
    ),
    "the time limit of the socket, set where it was made": (
        "runtime/ray/pairs.py Checker._answer",
    ),
    "a limit around it: the handshake's, the deadline of the operation, the fence of an instance without a master": (
        "runtime/handshake.py _run", "job/rpc/client.py RpcClient._until_answered",
        "job/rpc/client.py RpcClient._item_call", "job/rpc/client.py _first",
        "job/instance/flow.py Flow._commit_at_master", "job/instance/runners.py meet",
        "runtime/ray/client.py GatewayClient.request", "runtime/terminal.py Terminals.read",
        "service/rest/routes/jobs.py _wait_while",
    ),
    "the job: its end, that of its attempt, or of the processes whose exit is awaited": (
        "job/instance/spmd.py CommandRunner._wait_all", "job/master/master.py JobMaster.run",
        "service/cli/verbs/terminal.py _started", "service/cli/verbs/terminal.py shell_job",
    ),
    "it reads or carries what is there already, and that is finite": (
        "job/core/paths.py _walk", "job/master/master.py JobMaster._grant", "runtime/ray/engine.py Watcher._drain",
        "service/control/loop.py ServiceLoop.replay", "service/control/loop.py ServiceLoop.run",
        "tensors/writer.py TensorWriter.free_room", "cluster/core/cycle.py _Pass.run",
        "cluster/core/placement.py _place_uniform", "cluster/sim/runs.py fill",
    ),
    "a stream of the loop: the diagnosis of the job judges who waits too long; a failure or the end raises": (
        "job/instance/flow.py Flow.stream", "job/instance/handles.py StreamHandle.batches",
        "job/instance/streams.py Pump._feed", "job/instance/streams.py Pump.next_batch",
        "job/instance/streams.py Pump.put", "job/instance/streams.py Pump._carry",
        "job/instance/handles.py _Devices.held_by",
    ),
    "what it asks names how it goes on, and that comes to an end: pages, servers not asked before, restarts": (
        "service/control/job_files.py all_rows", "tensors/transport.py _Fetch._try", "tensors/session.py Session.pin",
        "service/aclient.py AsyncClient.copy", "service/aclient.py AsyncClient.event_pages",
        "service/aclient.py AsyncClient.log_pages",
    ),
    "the user of a verb or a client ends it, or the service; a lost connection has a number of tries": (
        "service/aclient.py AsyncClient._stream", "service/cli/verbs/inspect.py top",
    ),
    "the death of a process is waited for as long as it lives": (
        "runtime/ray/deaths.py DeathWatch.events", "runtime/ray/launcher.py RayLauncher.wait_end",
        "runtime/ray/host.py _wait_gone",
    ),
}  # fmt: skip

UNBOUNDED = {
    "job/instance/handles.py _Devices.__init__": "an entry for each call that the loop itself has made and waits for",
    "tensors/records.py OpenRing.__init__": "views of blocks that the ring has, at most its entries",
    "tensors/leases.py Leases.__init__": "holders of leases, whose number the file of the client bounds",
    "tensors/locks.py": "users of files that this process has open; the next use counts them off",
}
"""Queues without a size, and what bounds them."""


def _loops() -> Iterator[tuple[str, ast.While]]:
    """Loops that wait, by file and function."""
    for path in sorted(SOURCES.rglob("*.py")):
        name = str(path.relative_to(SOURCES))
        if not name.startswith("testing/"):
            yield from _below(tree_of(path), name, "")


def _below(node: ast.AST, file: str, inside: str) -> Iterator[tuple[str, ast.While]]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".strip(".")
        if isinstance(child, ast.While) and WAIT.search(ast.unparse(child)):
            yield f"{file} {name}", child
        yield from _below(child, file, name)


def test_each_loop_that_waits_has_a_limit_or_says_what_ends_it() -> None:
    without = {name for name, loop in _loops() if not LIMIT.search(ast.unparse(loop))}
    said = {name for names in ENDS.values() for name in names}
    assert without == said, f"limit these, or say what ends them: {without - said}; limited or gone: {said - without}"


def test_nothing_waits_by_a_function_that_may_lose_a_cancellation() -> None:
    """``asyncio.wait_for`` before Python 3.12 swallows a cancellation that comes together with the result."""
    found = [path for path in SOURCES.rglob("*.py") if "asyncio.wait_for(" in path.read_text(encoding="utf-8")]
    assert found == [], "write: async with clock.timeout(...)"


def test_the_time_and_the_timers_of_an_event_loop_are_used_in_runtime_alone() -> None:
    """Elsewhere they come from the clock that the part was given, so that one clock drives everything."""
    used = re.compile(r"loop(\(\))?\.(time|call_later|call_at)\b")
    paths = [path for path in SOURCES.rglob("*.py") if used.search(path.read_text(encoding="utf-8"))]
    found = {str(path.relative_to(SOURCES)) for path in paths}
    assert {name for name in found if not name.startswith("runtime/")} == set(), "use rota.runtime.clock"


LOCKED_FOR_A_MOMENT = {"tensors/devices/client.py", "tensors/devices/memfd.py"}
"""Whoever has the lock of these ranges alone sweeps what a dead keeper left, and takes no other lock meanwhile."""


def test_nothing_waits_for_a_lock_without_a_limit() -> None:
    """``take_lock`` of rota.runtime.file_locks has one, and names who has it (decision 0111)."""
    found = set[str]()
    for path in sorted(SOURCES.rglob("*.py")):
        for _, call in _calls(tree_of(path), ""):
            text = ast.unparse(call)
            if re.match(r"fcntl\.(flock|lockf)\(", text) and not re.search(r"LOCK_(NB|UN)", text):
                found.add(str(path.relative_to(SOURCES)))
    assert found == LOCKED_FOR_A_MOMENT, "wait with take_lock(path, lambda: try_lock(fd))"


def test_each_queue_has_a_size_or_a_reason() -> None:
    found = set[str]()
    for path in sorted(SOURCES.rglob("*.py")):
        name = str(path.relative_to(SOURCES))
        for inside, call in _calls(tree_of(path), ""):
            text = ast.unparse(call.func)
            if text in ("asyncio.Queue", "queue.Queue", "SimpleQueue", "deque") and not (call.args or call.keywords):
                found.add(f"{name} {inside}".strip())
    assert found == set(UNBOUNDED), f"give these a size, or a reason: {found ^ set(UNBOUNDED)}"


def _calls(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".strip(".")
        if isinstance(child, ast.Call):
            yield name, child
        yield from _calls(child, name)
