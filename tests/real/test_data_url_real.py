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


def test_what_a_job_wrote_is_at_its_url_when_it_has_ended_and_the_next_one_reads_it(
    installation: Installation, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store/run7"
    command = "mkdir -p $ROTA_OUTPUT_DIR/a; echo weights > $ROTA_OUTPUT_DIR/a/m"
    writes = f"name: writes\noutput: {url}\nroles:\n  main:\n    run: {command}\n"
    reads = f"name: reads\ndata: {url}\nroles:\n  main:\n    run: cat $ROTA_DATA_DIR/a/m\n"
    (installation.folder / "job.yaml").write_text(writes)
    done = installation.rota("run", "job.yaml", "-w")
    assert done.returncode == 0 and f"uploaded: 1 file to {url}" in done.stderr, done.stderr
    (installation.folder / "job.yaml").write_text(reads)
    assert installation.rota("run", "job.yaml", "-w").returncode == 0
    assert "weights" in installation.rota("logs", "reads-1").stdout
    failing = (
        writes.replace("name: writes", "name: fails").replace(url, f"{url}-failed").replace("/a/m", "/a/m; exit 3")
    )
    (installation.folder / "job.yaml").write_text(failing)
    assert installation.rota("run", "job.yaml", "-w").returncode == 1
    assert (tmp_path / "store" / "run7-failed" / "a" / "m").exists()
    assert "EXIT_NONZERO" in installation.rota("show", "fails-1").stdout
