"""The machines of a given engine from look to look: slow, hung, nameless and doubled ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from rota.runtime.ray.engine import HOST_LABEL

if TYPE_CHECKING:  # Ray reads its environment when it is imported, which real tests of the same session set first
    from rota.runtime.ray.machines import Machines


def row(identity: str, name: str = "", *, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": identity, "Alive": alive, "Labels": {HOST_LABEL: name} if name else {}, "Resources": {}}


def looks(ask: Callable[[str], Awaitable[bool]], body: Callable[[Machines], Awaitable[None]]) -> None:
    from rota.runtime.ray.machines import Machines

    async def says(one: Mapping[str, Any]) -> dict[str, Any]:
        return {"host": one["Labels"][HOST_LABEL], "id": one["NodeID"]} if await ask(one["NodeID"]) else {}

    asyncio.run(body(Machines(says)))


async def yes(_: str) -> bool:
    return True


def test_a_machine_that_hangs_is_asked_once_lives_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.runtime.ray.machines.LOOK_S", 0.02)
    answer, asked = asyncio.Event(), list[str]()

    async def ask(identity: str) -> bool:
        asked.append(identity)
        return identity == "1" or await answer.wait()

    async def body(seen: Machines) -> None:
        for _ in range(3):
            found = await seen.look([row("1", "one"), row("2", "two"), row("3", "three", alive=False)], {})
            assert [node["host"] for node in found["nodes"]] == ["one"] and found["alive"] == ["one", "two"]
        assert sorted(asked) == ["1", "2"] and seen.unusable == []
        answer.set()
        found = await seen.look([row("1", "one"), row("2", "two")], {})
        assert [node["host"] for node in found["nodes"]] == seen.hosts == ["one", "two"]

    looks(ask, body)


def test_one_that_does_not_say_what_it_has_is_told_of_avoided_and_asked_again() -> None:
    says = {"1": False}

    async def ask(identity: str) -> bool:
        return says[identity]

    async def body(seen: Machines) -> None:
        found = await seen.look([row("1", "one")], {})
        assert (found["nodes"], found["alive"]) == ([], ["one"])
        assert seen.unusable == ["1"] and seen.text.startswith("one: it did not say what it has: install Rota there")
        assert found["unusable"] == seen.problems
        says["1"] = True
        assert (await seen.look([row("1", "one")], {}))["nodes"] == [{"host": "one", "id": "1"}]
        assert (seen.unusable, seen.text) == ([], "")
        assert await seen.look([], {}) == {"nodes": [], "alive": [], "unusable": []}

    looks(ask, body)


def test_two_machines_of_one_name_are_told_of_and_the_first_keeps_it() -> None:
    async def body(seen: Machines) -> None:
        first, second = row("1", "one"), row("2", "one")
        found = await seen.look([first, second], {})
        assert (found["nodes"], found["alive"]) == ([], ["one"])
        assert seen.unusable == ["1", "2"] and "several machines have the name one" in seen.text
        for rows in ([first], [first, second], [second, first]):
            assert (await seen.look(rows, {}))["nodes"] == [{"host": "one", "id": "1"}]
        assert seen.unusable == ["2"]
        assert (await seen.look([second], {}))["nodes"] == [{"host": "one", "id": "2"}]

    looks(yes, body)


def test_machines_without_a_name_get_that_of_their_host_and_are_told_apart_by_their_identity() -> None:
    from rota.runtime.ray.engine import host_selector
    from rota.runtime.ray.machines import Machines, pin_of
    from rota.runtime.topology import IDENTITY

    on = {"1": ("m", "aaaa11"), "2": ("m", "bbbb22"), "3": ("m", "aaaa11"), "4": ("other", "cccc33")}

    async def says(one: Mapping[str, Any]) -> dict[str, Any]:
        name, identity = on[one["NodeID"]]
        return {"host": pin_of(one["NodeID"]), "id": name, "labels": [[IDENTITY, identity]]}

    async def body() -> None:
        seen = Machines(says)
        assert [node["id"] for node in (await seen.look([row("1")], {}))["nodes"]] == ["m"]
        found = await seen.look([row(one) for one in on], {})
        assert [node["id"] for node in found["nodes"]] == ["m", "m-bbbb", "other"], "who has a name keeps it"
        assert seen.unusable == ["3"], "the second node of one machine"
        assert found["unusable"] == [
            {"machine": "m", "why": "a second Ray node runs on that machine", "remedy": "end it there: ray stop"}
        ]
        assert {*found["alive"]} == {*map(pin_of, on), "m", "m-bbbb", "other"}
        assert (seen.host_of("m-bbbb"), seen.host_of("m9")) == (pin_of("2"), "m9")
        assert host_selector(found["nodes"][0]["host"]) == {"ray.io/node-id": "1"}
        alone = await seen.look([row("2")], {})
        assert [node["id"] for node in alone["nodes"]] == ["m-bbbb"]
        anew = await Machines(says).look([row("1"), row("2")], {})
        assert [node["id"] for node in anew["nodes"]] == ["m-aaaa", "m-bbbb"]
        assert host_selector("m0") == {HOST_LABEL: "m0"}

    asyncio.run(body())


def test_one_that_another_installation_has_is_not_there_but_for_its_text() -> None:
    async def body(seen: Machines) -> None:
        rows = [row("1", "one"), row("2", "two")]
        assert (await seen.look(rows, {}))["alive"] == ["one", "two"]
        found = await seen.look(rows, {"2": "in /a on h"})
        assert ([node["host"] for node in found["nodes"]], found["alive"], seen.unusable) == (["one"], ["one"], ["2"])
        assert seen.text == "two: used by the installation in /a on h: end that one with 'rota down'"
        assert (await seen.look(rows, {}))["alive"] == ["one", "two"] and not seen.text

    looks(yes, body)
