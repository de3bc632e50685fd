"""Versions of tensors between machines beside a raw socket copy and beside Ray's object transfer, in one run.

``python benchmarks/machines.py [--rounds N] [--mib N] [--calls N]`` prints one JSON document. The machines are network
namespaces of this computer, joined by a bridge (``tests/machines/bed.py``; needs root), so that the wire is its memory
and its processors: ratios say something, bytes a second do not. Rounds alternate, a figure is the median over rounds.

- ``copy``: a version of 256 MiB, from the call until its tensor can be read on the other machine. Peers: ``sendfile``
  from shared memory and ``recv_into`` a buffer that is used again; ``ray.get`` of an array that ``ray.put`` made there.
- ``small``: the same for 4 KiB, after it was published. Peer: ``ray.get`` of an array of 4 KiB.
- ``tree``: four machines with four readers each want one version: bytes that left the publisher, and the time until the
  last reader has it, beside that of one reader.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.machines.bed import Machine, bed, missing
from tests.machines.site import GCS_PORT, SHARED
from tests.machines.stores import KEY, Crew, crew

from run import Row, hand_in, skip

MIB = 1 << 20
STORE_BYTES = 1_500_000_000
LIMIT_S = 300.0
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_INSIDE = """
import json, os, socket, statistics, sys, time
import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

KEY, ROUNDS, MIB, CALLS = {key!r}, {rounds}, {mib}, {calls}
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")


@ray.remote(num_cpus=0)
class End:
    def __init__(self, host):
        from rota import tensors
        from rota.runtime import directory
        from rota.tensors import transport
        self.transport, address = transport, ray.util.get_node_ip_address()
        self.known = directory.FixedDirectory(host, address, bytes.fromhex(KEY))
        directory.use(self.known)
        self.plane = tensors.connect(home="/tmp/home", keep=True)
        self.store, self.address = transport.own_store(self.plane), address
        self.buffer = self.file = None

    def meet(self, store=None):
        if store: self.known.known["m0"] = store
        return self.store

    def publish(self, step, size):
        self.plane.publish_group(f"w{{size}}", {{"x": np.full(size // 4, step, np.float32)}}, step=step)

    def pull(self, step, size):
        began = time.perf_counter()
        found = self.transport.pull(self.plane, f"w{{size}}", step=step, near="m0", as_="numpy")["x"]
        took = time.perf_counter() - began
        assert found[0] == step and found[-1] == step and found.nbytes == size
        return took

    def put(self, step, size):
        return [ray.put(np.full(size // 4, step, np.float32))]

    def get(self, refs, step):
        began = time.perf_counter()
        found = ray.get(refs[0])
        took = time.perf_counter() - began
        assert found[0] == step and found[-1] == step
        return took

    def listen(self, size):
        path = "/dev/shm/raw"
        with open(path, "wb") as file: file.write(b"x" * size)
        self.file = open(path, "rb")
        self.server = socket.create_server((self.address, 0))
        return self.server.getsockname()[1]

    def send(self, size):
        link, _ = self.server.accept()
        at = 0
        while at < size: at += os.sendfile(link.fileno(), self.file.fileno(), at, size - at)
        link.recv(1)
        link.close()

    def receive(self, host, port, size):
        if self.buffer is None: self.buffer = memoryview(bytearray(size))
        began = time.perf_counter()
        link, at = socket.create_connection((host, port)), 0
        while at < size: at += link.recv_into(self.buffer[at:])
        took = time.perf_counter() - began
        link.send(b".")
        link.close()
        return took


def on(host):
    (row,) = [row for row in ray.nodes() if row["Labels"].get("rota-host") == host and row["Alive"]]
    return End.options(scheduling_strategy=NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)).remote(host)

far, near = on("m0"), on("m1")
ray.get(near.meet.remote(ray.get(far.meet.remote())))
size, found = MIB << 20, {{"rota": [], "raw": [], "ray": []}}
port, host = ray.get(far.listen.remote(size)), {host!r}
for step in range(1, ROUNDS + 3):
    ray.get(far.publish.remote(step, size))
    rota = ray.get(near.pull.remote(step, size))
    sent = far.send.remote(size)
    raw = ray.get(near.receive.remote(host, port, size))
    ray.get(sent)
    refs = ray.get(far.put.remote(step, size))
    other = ray.get(near.get.remote(refs, step))
    del refs
    if step > 2:
        for name, value in (("rota", rota), ("raw", raw), ("ray", other)): found[name].append(value)
small = {{"rota": [], "ray": []}}
for step in range(1, CALLS + 20):
    ray.get(far.publish.remote(step, 4096))
    rota = ray.get(near.pull.remote(step, 4096))
    refs = ray.get(far.put.remote(step, 4096))
    other = ray.get(near.get.remote(refs, step))
    if step >= 20:
        small["rota"].append(rota); small["ray"].append(other)
print("FOUND", json.dumps({{"copy": found, "small": small}}), flush=True)
"""


def over_ray(machines: Sequence[Machine], rounds: int, mib: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by measure and by side."""
    address = f"{machines[0].address}:{GCS_PORT}"
    for machine in machines[:2]:
        given = ["--num-cpus", "4", "--labels", f"rota-host={machine.name}", "--node-ip-address", machine.address]
        first = ["--head", "--port", str(GCS_PORT), "--include-dashboard", "false"]
        where = first if machine is machines[0] else ["--address", address]
        store = ["--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"]
        machine.run(*_RAY, "start", *where, *given, *store, timeout_s=LIMIT_S)
    code = _INSIDE.format(key=KEY, rounds=rounds, mib=mib, calls=calls, address=address, host=machines[0].address)
    out = machines[0].run(sys.executable, "-c", code, env={"PYTHONPATH": os.pathsep.join(sys.path)}, timeout_s=LIMIT_S)
    (line,) = [line for line in out.splitlines() if line.startswith("FOUND ")]
    found: dict[str, dict[str, list[float]]] = json.loads(line[6:])
    return found


def tree(machines: Sequence[Machine], rounds: int, mib: int) -> dict[str, list[float]]:
    """Seconds for one reader and for sixteen on four machines, and copies that left the publisher for the sixteen."""
    found: dict[str, list[float]] = {"one_s": [], "all_s": [], "copies": []}
    with crew(machines) as scripts:
        for number in range(rounds):
            name, size = f"w{number}", mib << 20
            code = f"""
            for step in (1, 2):
                plane.publish_group({name!r} + str(step), {{"x": np.full({size} // 4, step, np.float32)}}, step=step)
            say(done=True)
            threading.Event().wait()
            """
            publisher = scripts.start(machines[0], code)
            publisher.said(LIMIT_S)
            found["one_s"].append(spread(scripts, machines[1:2], 1, f"{name}1", 1))
            before = scripts.stat(machines[0])["sent_bytes"]
            found["all_s"].append(spread(scripts, machines[1:], 4, f"{name}2", 2))
            found["copies"].append((scripts.stat(machines[0])["sent_bytes"] - before) / size)
            names = [[f"{name}{step}", scripts.stores["m0"]] for step in (1, 2)]
            scripts.start(machines[0], f"transport.delete(plane, {names!r}); say(ok=1)").said()
            publisher.end()
    return found


def spread(scripts: Crew, machines: Sequence[Machine], readers: int, name: str, step: int) -> float:
    """Seconds from a common start until the last of the readers has the version."""
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        code = f"""
        say(up=True)
        go = {folder!r} + "/go"
        while not os.path.exists(go): time.sleep(0.002)
        at = float(open(go).read())
        while time.time() < at: time.sleep(0.0005)
        found = transport.pull(plane, {name!r}, step={step}, near="m0", wait_s=60, as_="numpy")["x"]
        ended = time.time()
        assert found[0] == {step} and found[-1] == {step}
        say(s=ended - at)
        """
        started = [scripts.start(machine, code) for machine in machines for _ in range(readers)]
        for one in started:
            one.said(LIMIT_S)
        draft = Path(folder) / "draft"
        draft.write_text(repr(time.time() + 0.5))
        draft.rename(Path(folder) / "go")
        return max(float(one.said(LIMIT_S)["s"]) for one in started)


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--trees", type=int, default=3)
    args = parser.parse_args()
    if why := missing():
        skip(why)
        print(json.dumps({"skipped": why}))
        return
    # whoever has a token of Ray in the home folder would start a head that asks the other machines for it
    environ = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    with bed(5, subnet=83, environ=environ) as machines:
        found = over_ray(machines, args.rounds, args.mib, args.calls)
        for machine in machines[:2]:
            machine.kill()
            machine.start()
        spreads = tree(machines, args.trees, args.mib)
    middle = {what: {side: statistics.median(each) for side, each in sides.items()} for what, sides in found.items()}
    copy, small = middle["copy"], middle["small"]
    one_s, all_s = statistics.median(spreads["one_s"]), statistics.median(spreads["all_s"])
    document: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "mib": args.mib, "rounds": args.rounds, "seconds": middle, "spread": spreads,
        "of_raw_speed": round(copy["raw"] / copy["rota"], 3), "times_ray": round(copy["ray"] / copy["rota"], 2),
        "small_ms": round(1000 * small["rota"], 3), "small_of_ray": round(small["rota"] / small["ray"], 3),
        "copies": max(spreads["copies"]), "sixteen_of_one": round(all_s / one_s, 2),
    }  # fmt: skip
    print(json.dumps(document, indent=1))
    hand_in(
        [
            Row(f"{args.mib} MiB to another machine", 1000 * copy["rota"], "ms", 1000 * copy["raw"], "raw socket"),
            Row(f"{args.mib} MiB to another machine", 1000 * copy["rota"], "ms", 1000 * copy["ray"], "ray.get"),
            Row("4 KiB to another machine", 1000 * small["rota"], "ms", 1000 * small["ray"], "ray.get"),
            Row("copies sent for 16 readers on 4 machines", document["copies"], "", 2.0),
            Row("16 readers on 4 machines", all_s, "s", one_s, "one reader"),
        ]
    )


if __name__ == "__main__":
    main()
