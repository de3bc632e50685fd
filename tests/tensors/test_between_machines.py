"""What the tensor servers of machines remember: who has a version, and which connections are idle; no engine."""

from __future__ import annotations

import socket

import pytest

from rota.tensors import transport
from rota.tensors.server import Receivers


def test_the_first_two_machines_get_a_version_from_its_owner_and_the_others_from_those() -> None:
    sent = Receivers()
    assert [sent.route(to, []) for to in ("a", "b", "c", "d", "e")] == ["", "", "a", "b", "a"]
    assert sent.route("c", []) == "a" and sent.route("", []) == ""


def test_a_machine_that_one_other_cannot_reach_still_serves_the_rest_and_hears_of_deletions() -> None:
    sent = Receivers()
    for to in ("a", "b", "c"):
        sent.route(to, [])
    assert sent.route("c", ["a"]) == "", "one of two is left: it comes from here"
    assert sent.route("d", []) == "b" and sent.route("e", []) == "a", "for others it is as before"
    assert sent.stores == ["a", "b", "c", "d", "e"]
    assert sent.route("e", ["a"]) == "b"
    assert sent.route("f", []) == "c", "two could not reach it: nobody is sent there"
    assert "a" in sent.stores


def test_connections_that_the_other_side_closed_are_neither_used_nor_left_half_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_IDLE_S", 0.2)
    links = transport._Links()
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, _ in pairs[:2]:
        links.give("m0:1", ours)
    pairs[1][1].close()
    assert links.take("m0:1") is pairs[0][0], "the newest was closed over there"
    assert pairs[1][0].fileno() < 0
    links.give("m0:1", pairs[0][0])
    links.give("m1:1", pairs[2][0])
    for _, theirs in (pairs[0], pairs[2]):
        theirs.settimeout(60)
        assert theirs.recv(1) == b"", "whoever is done with a machine closes its connections"
    assert links.take("m0:1") is None and links.take("m1:1") is None
