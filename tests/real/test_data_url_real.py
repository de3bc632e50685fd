"""A job reads data by URL from a real web server; the next one on the machine has it without asking for the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.real.test_cli_real import Installation, installation
from tests.runtime.test_data_cache import Web

__all__ = ["installation"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_jobs_read_data_that_is_fetched_once(installation: Installation, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "words.txt").write_text("from the store")
    web = Web(source)
    try:
        for name in ("first", "second"):
            (installation.folder / "job.yaml").write_text(
                f"name: {name}\ndata: {web.url}\nroles:\n  main:\n    run: cat $ROTA_DATA_DIR/words.txt\n"
            )
            done = installation.rota("run", "job.yaml", "-w")
            assert done.returncode == 0, done.stderr
            assert "from the store" in installation.rota("logs", f"{name}-1").stdout
        assert web.paths.count("/words.txt") == 1
    finally:
        web.server.shutdown()
        web.server.server_close()
