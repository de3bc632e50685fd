"""The start of an engine whose nodes do not come up; the real one is in ``tests/real``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rota.runtime.ray import engine
from rota.runtime.ray.engine import EngineFiles, EngineSettings, EngineState, EngineUnavailable


class Up(Exception):
    """A node came up."""


@pytest.mark.parametrize(
    "bad, tried",
    [(0, ["rocksdb"]), (1, ["rocksdb"] * 2), (2, ["rocksdb", "rocksdb", "memory"]), (3, None)],
)
def test_one_slow_start_costs_no_durable_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, tried: list[str] | None
) -> None:
    seen = list[str]()

    def start_node(
        files: EngineFiles, settings: EngineSettings, name: str, config: Mapping[str, object], timeout_s: float
    ) -> EngineState:
        seen.append(settings.storage)
        assert not files.storage.exists(), "nothing of an earlier try"
        files.storage.mkdir(parents=True)
        if len(seen) > bad:
            raise Up
        raise EngineUnavailable(f"not ready within {timeout_s:.0f} s")

    monkeypatch.setattr(engine, "start_node", start_node)
    with pytest.raises(EngineUnavailable if tried is None else Up) as failure:
        engine.start_engine(tmp_path, EngineSettings())
    assert seen == (tried or ["rocksdb", "rocksdb", "memory"])
    if tried is None:
        assert "rocksdb: not ready within 90 s; rocksdb: not ready within 90 s; memory: not" in str(failure.value)
