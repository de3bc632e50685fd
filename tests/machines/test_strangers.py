"""Every port on which two machines of an installation listen is closed to a third one that has no key and no token."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from tests.machines.bed import Machine, bed
from tests.machines.counting import CODE, Watched
from tests.machines.site import Site, long, site
from tests.machines.test_calls import HANDSHAKE_BYTES, Trap

from rota.runtime.frames import CALL, encode, pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAP = "/tmp/trap"
JOB = """
name: ports
env: {STEP_S: "0.3"}
roles:
  counter:
    workload: "counting:Counter"
    resources: {cpus: 1}
    fail: {state: peer}
    apart: [{role: loop, level: node}]
  loop: {workload: "counting:counts", resources: {cpus: 1}}
"""
STRANGER = """
import json, socket, sys
import grpc

METHODS = [
    "NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVGet", "NodeManagerService/GetNodeStats",
    "CoreWorkerService/PushTask", "ObjectManagerService/Push", "ReporterService/GetTraceback",
]
PATHS = ["/api/v1/jobs", "/api/v1/machines", "/api/job_agent/jobs/", "/get_or_create_runtime_env"]
trap = bytes.fromhex(sys.argv[2])


def exchange(address, data, wait_s):
    said = b""
    with socket.create_connection(address, 10) as link:
        link.settimeout(wait_s)
        try:
            link.sendall(data)
            while got := link.recv(4096): said += got
        except (ConnectionError, TimeoutError): pass
    return said


def called(target, method):
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary("/ray.rpc." + method, lambda raw: raw, lambda raw: raw)
        try:
            call(b"", timeout=10)  # a message of any of them; another one would fail to parse first
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def look(host, port):
    said = exchange((host, port), trap, 10)
    if said.startswith(b"ROTA"):
        return ["handshake", [len(said)]]
    found = set()
    for path in PATHS:
        head = f"POST {path} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\nConnection: close\\r\\n"
        head += f"Content-Length: {len(trap)}\\r\\n\\r\\n"
        found.add(exchange((host, port), head.encode() + trap, 10)[:12].decode(errors="replace"))
    if all(one.startswith("HTTP/1.1 ") for one in found):
        return ["http", sorted(one[9:] for one in found)]
    return ["grpc", sorted({called(f"{host}:{port}", method) for method in METHODS})]


print(json.dumps({at: look(at.rpartition(":")[0], int(at.rpartition(":")[2])) for at in json.loads(sys.argv[1])}))
"""
CLOSED = {
    "handshake": {HANDSHAKE_BYTES},
    "http": {"401", "403", "404", "405"},
    "grpc": {"UNAUTHENTICATED", "UNIMPLEMENTED"},
}
"""What a listener may say: its challenge and nothing after it; that it wants a token, or has no such method."""
WANTS_PROOF = {"handshake": HANDSHAKE_BYTES, "http": "401", "grpc": "UNAUTHENTICATED"}


@pytest.fixture(scope="module")
def over_two() -> Iterator[tuple[Site, Machine]]:
    """An installation over two machines, and one that is no part of it."""
    with bed(3, subnet=87) as machines, site(machines[:2], joined=True, cpus=[2, 2]) as made:
        made.put("counting.py", CODE)
        yield made, machines[2]


def listeners(machine: Machine) -> dict[str, str]:
    """Address and port of each listener that other machines reach, and whose it is."""
    found = dict[str, str]()
    for line in machine.run("ss", "-Hltnp").splitlines():
        host, _, port = line.split()[3].rpartition(":")
        if not host.startswith("127.") and host != "[::1]":
            found[f"{machine.address}:{port}"] = line.split()[5]
    return found


@long
def test_a_stranger_is_refused_at_every_port_of_both_machines(over_two: tuple[Site, Machine]) -> None:
    over, stranger = over_two
    job = Watched(over, over.submit(JOB))
    job.goes_on()
    job.wait(lambda: any(one["kind"] == "CommitCopied" for one in job.events()), "its state is on both machines")
    before = {at: who for machine in over.machines for at, who in listeners(machine).items()}
    frame = b"".join(map(bytes, encode(1, CALL, pack(Trap(TRAP))))).hex()
    said = json.loads(stranger.run(sys.executable, "-c", STRANGER, json.dumps(list(before)), frame, timeout_s=600.0))
    kinds = [kind for kind, _ in said.values()]
    # The call servers of both roles and the tensor servers, the service, agents of the engine, and the engine itself.
    assert kinds.count("handshake") >= 4 and kinds.count("http") >= 1 and kinds.count("grpc") >= 6, said
    for at, (kind, answers) in said.items():
        assert set(answers) <= CLOSED[kind] and WANTS_PROOF[kind] in answers, (at, before[at], kind, answers)
    for machine in over.machines:
        assert not machine.path(TRAP).exists(), machine.name
    assert set(before) <= {at for machine in over.machines for at in listeners(machine)}, "one of them has ended"
    job.goes_on()
    assert len(job.entries()) == 1
    job.end()
