"""Checks between machines as findings, and what a machine does, by values."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest

from rota.runtime import process
from rota.runtime.usage import device_usage, machine_usage, member_of
from rota.service.machine_checks import node_findings

VERSIONS = {"python": "3.11.4", "ray": "2.60.0", "rota": "0.1.0", "torch": "2.9.0"}


def machine(name: str, error: str = "", **versions: str) -> Any:
    address = f"10.0.0.{name[-1]}"
    known = {} if error else VERSIONS | versions
    return {"node": name, "host_name": name, "address": address, "versions": known, "error": error}


def pair(source: str, target: str, **seen: Any) -> Any:
    fine = {"resolves": True, "latency_s": 0.0002, "skew_s": 0.001, "bytes_per_s": 1e9, "error": ""}
    return {"source": source, "target": target, **fine, **seen}


def found(machines: list[Any], *pairs: Any) -> list[tuple[str, str, str, str]]:
    items = node_findings({"machines": machines, "pairs": [*pairs]})
    return [(one["mark"], one["name"], one["fact"], one["remedy"]) for one in items]


def test_machines_that_agree_have_no_findings() -> None:
    there = [machine("m0"), machine("m1", python="3.11.9")]
    assert found(there, pair("m0", "m1"), pair("m1", "m0")) == []


def test_other_versions_are_named_with_the_command_for_the_fewer() -> None:
    there = [machine("m0"), machine("m1"), machine("m2", ray="2.59.0", torch="2.8.0")]
    assert found(there) == [
        ("fail", "ray", "2.59.0 on m2; 2.60.0 on m0, m1", "on m2: pip install ray==2.60.0"),
        ("warn", "torch", "2.8.0 on m2; 2.9.0 on m0, m1", "on m2: pip install torch==2.9.0"),
    ]


def test_ports_names_clocks_and_slow_pairs_are_found_with_their_remedies() -> None:
    there = [machine("m0"), machine("m1"), machine("m2"), machine("m3", error="TimeoutError")]
    seen = found(
        there,
        pair("m0", "m1", skew_s=7.0),
        pair("m1", "m0", skew_s=-7.0),
        pair("m0", "m2", resolves=False, skew_s=-0.9),
        pair("m2", "m0", bytes_per_s=1e8),
        pair("m1", "m2", error="10.0.0.2:4000: timed out", latency_s=None, skew_s=None, bytes_per_s=None),
    )
    assert [one[:2] for one in seen] == [
        ("fail", "clock"), ("fail", "machine"), ("fail", "ports"),
        ("warn", "bandwidth"), ("warn", "clock"), ("warn", "name"),
    ]  # fmt: skip
    texts = {(one[0], one[1]): one[2:] for one in seen}
    fact, remedy = texts["fail", "clock"]
    assert fact == "the clock of m1 is +7.00 s from that of m0" and "chronyd" in remedy
    assert texts["warn", "name"] == ("m0 does not know the name m2", "on m0: echo '10.0.0.2 m2' >> /etc/hosts")
    fact, remedy = texts["fail", "ports"]
    assert fact == "m1 to m2: 10.0.0.2:4000: timed out" and "firewall" in remedy
    assert texts["warn", "bandwidth"][0] == "m2 to m0: 100 MB/s, the fastest pair has 1000 MB/s"


def test_processes_of_jobs_are_known_by_their_titles() -> None:
    assert member_of("ray::x-1/main/1/1:Host.__init__") == ("x-1", "main/1")
    assert member_of("ray::grpo-sums-1/actor/12/3") == ("grpo-sums-1", "actor/12")
    assert member_of("ray::x-1/master:Host.born") == ("x-1", "master")
    for other in ("ray::IDLE", "ray::DashboardAgent", "python x-1/main/1", "ray::x-1/masters"):
        assert member_of(other) is None


def test_what_the_driver_measures_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "0, NVIDIA H200, 37, 1024, 143771, 402.12, 41\n1, NVIDIA H200, [N/A], 0, 143771, [N/A], [N/A]\nno devices\n"
    monkeypatch.setattr(process, "output_of", lambda command, timeout_s: text)
    first, second = device_usage()
    assert (first["busy"], first["memory_used_bytes"], first["power_w"]) == (0.37, 2**30, 402.12)
    assert (second["index"], second["busy"], second["power_w"], second["temperature_c"]) == (1, None, None, None)


def test_this_machine_is_measured() -> None:
    found = machine_usage(0.05)
    assert 0 <= found["cores_busy"] <= (os.cpu_count() or 1) and 0 < found["memory_used_bytes"] < found["memory_bytes"]
    (root,) = [one for one in found["disks"] if one["path"] == "/"]
    assert 0 < root["used_bytes"] <= root["total_bytes"]
    assert "lo" in {one["name"] for one in found["network"]}


def test_a_pair_is_measured_and_the_key_of_the_check_never_crosses_the_wire() -> None:
    from rota.runtime.handshake import KEY_BYTES
    from rota.runtime.ray.pairs import Checker

    key = b"k" * KEY_BYTES
    one, other = Checker(key, "127.0.0.1"), Checker(key, "127.0.0.1")
    found = other.look("localhost", "127.0.0.1", one.facts()["port"])
    assert found["error"] == "" and abs(found["skew_s"]) < 5.0 and found["bytes_per_s"] > 0.0
    stranger = Checker(b"x" * KEY_BYTES, "127.0.0.1")
    assert "another key" in stranger.look("localhost", "127.0.0.1", one.facts()["port"])["error"]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        said: list[bytes] = []

        def overhear() -> None:
            link, _ = listening.accept()
            with link:
                link.sendall(b"ROTA\0\0\0\1" + bytes(32))
                said.append(link.recv(4096))

        thread = threading.Thread(target=overhear)
        thread.start()
        assert one.look("localhost", "127.0.0.1", listening.getsockname()[1])["error"] != ""
        thread.join()
    assert said[0].startswith(b"ROTA") and key not in said[0]
