"""A registry server that is too old is refused by its version, before anything is stored in it."""

from __future__ import annotations

import socketserver
import threading
from pathlib import Path

import pytest

from rota.runtime.environ import Home
from rota.runtime.redis import server as redis_server
from rota.spec.errors import RegistryUnavailable


class Old(socketserver.StreamRequestHandler):
    """Answers as a Redis 5 would: PONG, and what INFO says there."""

    def handle(self) -> None:
        while head := self.rfile.readline():
            words = [self.rfile.readline() and self.rfile.readline().strip() for _ in range(int(head[1:]))]
            info = b"# Server\r\nredis_version:5.0.14\r\nprocess_id:1\r\n"
            self.wfile.write(b"$%d\r\n%s\r\n" % (len(info), info) if words[0] == b"INFO" else b"+PONG\r\n")


def test_a_server_that_is_too_old_is_named_with_its_version_and_the_remedy(tmp_path: Path) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(RegistryUnavailable, match=r"its version is 5\.0, and 6\.2 is the oldest") as refused:
            redis_server.find_or_start(Home.of(tmp_path), url=f"redis://127.0.0.1:{server.server_address[1]}/0")
        server.shutdown()
    assert "unset ROTA_REDIS_URL" in refused.value.hint


def test_a_program_that_is_too_old_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.write_text(f"#!/bin/sh\necho started >> {tmp_path}/told\necho 'Redis server v=6.0.16 sha=00000000:0'\n")
    program.chmod(0o700)
    monkeypatch.setattr(redis_server, "_programs", lambda tried: [str(program)])
    with pytest.raises(RegistryUnavailable, match=rf"{program}: its version is 6\.0") as refused:
        redis_server.find_or_start(Home.of(tmp_path / "home"))
    assert "redis-server >= 6.2" in refused.value.hint
    assert (tmp_path / "told").read_text() == "started\n", refused.value  # asked for its version, and no more
