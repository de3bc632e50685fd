"""Loops that wait: each has a limit in it, or a line here that says what ends it; queues have a size, or a reason."""

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
    ),
    "a limit around it: the handshake's, the deadline of the operation, the fence of an instance without a master": (
        "runtime/handshake.py _run", "job/rpc/client.py RpcClient._until_answered",
        "job/rpc/client.py RpcClient._item_call", "job/rpc/client.py _first",
        "job/instance/flow.py Flow._commit_at_master", "job/instance/runners.py meet",
    ),
    "a stream of the loop: the diagnosis of the job judges who waits too long; a failure or the end raises": (
        "job/instance/flow.py Flow.stream", "job/instance/handles.py StreamHandle.batches",
        "job/instance/streams.py Pump._feed", "job/instance/streams.py Pump.next_batch",
        "job/instance/streams.py Pump.put",
    ),
    "what it asks names how it goes on, and that comes to an end: pages, servers not asked before, restarts": (
        "service/control/job_files.py all_rows", "tensors/transport.py _Fetch._try", "tensors/session.py Session.pin",
    ),
    "the user of a verb or a client ends it, or the service; a lost connection has a number of tries": (
        "service/aclient.py AsyncClient._stream", "service/cli/verbs/inspect.py top",
    ),
    "the death of a process is waited for as long as it lives": (
        "runtime/ray/deaths.py DeathWatch.events", "runtime/ray/launcher.py RayLauncher.wait_end",
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
    """Endless loops that wait, by file and function."""
    for path in sorted(SOURCES.rglob("*.py")):
        name = str(path.relative_to(SOURCES))
        if not name.startswith("testing/"):
            yield from _below(tree_of(path), name, "")


def _below(node: ast.AST, file: str, inside: str) -> Iterator[tuple[str, ast.While]]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".strip(".")
        if isinstance(child, ast.While) and isinstance(child.test, ast.Constant) and WAIT.search(ast.unparse(child)):
            yield f"{file} {name}", child
        yield from _below(child, file, name)


def test_each_loop_that_waits_has_a_limit_or_says_what_ends_it() -> None:
    without = {name for name, loop in _loops() if not LIMIT.search(ast.unparse(loop))}
    said = {name for names in ENDS.values() for name in names}
    assert without == said, f"limit these, or say what ends them: {without - said}; limited or gone: {said - without}"


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
