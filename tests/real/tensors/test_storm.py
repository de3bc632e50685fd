"""Processes and the registry are killed, stopped and emptied at random: nothing torn, stale, lost or left behind.

Of each name one process at a time publishes and deletes. Before it does operation n it notes n as begun, afterwards as
acknowledged. A reader that looks must see an operation between the one acknowledged before its look and the one begun
after it, and none older than it saw before.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.real.tensors.crew import Cases, Crew
from tests.real.tensors.test_recover import kill_server, own_home, plane

from rota.runtime import environ, process
from rota.runtime.redis import server as redis_server
from rota.spec.errors import RegistryUnavailable
from rota.tensors.api.store import Plane

__all__ = ["own_home", "plane"]  # fixtures: a server of this file alone, since its tests kill it

NAMES = ("plain", "churn", "group")
FAULTS, REGISTRY_FAULTS = 1000, 300
A_ROUND = 13
SHARED = """
import mmap, time
from rota.spec.errors import RegistryUnavailable
from rota.tensors import errors
words = memoryview(mmap.mmap(os.open({words!r}, os.O_RDWR), 0)).cast('Q')
index, name = {index}, {name!r}
"""
WRITER = (
    SHARED
    + """
n = words[2 * index]
while True:
    n += 1
    words[2 * index] = n  # begun
    while True:
        try:
            if name == 'group':
                plane.publish_group(name, {{'a': np.full({size}, n), 'b': np.full(3, n)}})
            elif name == 'churn' and n % 2 == 0:
                plane.delete(name, missing_ok=True)
            else:
                plane.put(name, np.full({size}, n))
        except (errors.PublishBlocked, errors.Aborted, RegistryUnavailable) as error:
            print(type(error).__name__, n, flush=True)
            continue
        break
    words[2 * index + 1] = n  # acknowledged
"""
)
READER = (
    SHARED
    + """
seen = 0
while True:
    acknowledged = words[2 * index + 1]
    try:
        if name == 'group':
            found = plane.get_group(name, as_='numpy')
            assert (found['a'] == found['b'][0]).all(), ('torn', found['b'])
            value = found['b']
        else:
            value = plane.get(name, as_='numpy')
            assert (value == value[0]).all(), ('torn', value)
    except (errors.NotFound, errors.VersionGone):
        begun = words[2 * index]
        gone = name == 'churn' and begun >= (acknowledged + 1) // 2 * 2
        if acknowledged and not gone:
            os.write(1, b'STALE %s: nothing, acknowledged %d, begun %d\\n' % (name.encode(), acknowledged, begun))
        continue
    except RegistryUnavailable:
        print('RegistryUnavailable', flush=True)
        continue
    now, begun = int(value[0]), words[2 * index]
    if not max(seen, acknowledged) <= now <= begun:
        facts = (name.encode(), now, seen, acknowledged, begun)
        os.write(1, b'STALE %s: %d, seen %d, acknowledged %d, begun %d\\n' % facts)
    seen = max(now, seen)
    if now % {hold} == 0:
        plane.release(name)
        found = value = None
"""
)


class Storm:
    """Two readers and a writer of each name, and what happened to them."""

    def __init__(self, home: Path, folder: Path, actors: Crew, rng: random.Random) -> None:
        self._home, self._actors, self._rng = home, actors, rng
        self._file = folder / "words"
        self._file.write_bytes(bytes(16 * len(NAMES)))
        with self._file.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self.workers: dict[int, tuple[str, int]] = {}
        self.happened = Counter[str]()
        self.said = list[str]()

    def begin(self) -> None:
        """Start all with names that were never published."""
        for index in range(2 * len(NAMES)):
            self._words[index] = 0
        for index in range(len(NAMES)):
            for code in (WRITER, READER, READER):
                self._start(code, index)

    def end(self) -> None:
        """Kill all, stopped or not."""
        for pid in [*self.workers]:
            self._kill(pid)

    def disturb_a_process(self) -> None:
        """Kill a process, which another replaces, or stop it for a while."""
        pid = self._rng.choice([*self.workers])
        code, index = self.workers[pid]
        if self._rng.random() < 0.7:
            self._kill(pid)
            self._start(code, index)
            self.happened["process killed"] += 1
        else:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._rng.choice((0.001, 0.02, 0.2)))
            os.kill(pid, signal.SIGCONT)
            self.happened["process stopped"] += 1

    def disturb_the_registry(self, plane: Plane) -> None:
        """Kill the server, stop it for a while, or empty it."""
        what = self._rng.choice(("killed", "stopped", "emptied"))
        if what == "killed" and redis_server.find_running(environ.Home.of(self._home)):
            kill_server(self._home)
        elif what == "emptied":
            with contextlib.suppress(RegistryUnavailable):  # nobody has started it again yet
                plane._session.machine.client.call("FLUSHALL")
        elif (server := redis_server.find_running(environ.Home.of(self._home))) is not None:
            process.send_signal(server.process, signal.SIGSTOP)
            time.sleep(self._rng.choice((0.001, 0.02, 0.2)))
            process.send_signal(server.process, signal.SIGCONT)
        self.happened[f"registry {what}"] += 1

    def _start(self, code: str, index: int) -> None:
        where = {"words": str(self._file), "index": index, "name": NAMES[index]}
        size = self._rng.choice((10, 500, 5000, 200_000))
        self.workers[self._actors.start(code.format(**where, size=size, hold=self._rng.choice((1, 3))))] = code, index

    def _kill(self, pid: int) -> None:
        del self.workers[pid]
        os.kill(pid, signal.SIGKILL)
        status, text = self._actors.wait(pid), self._actors.output(pid)
        if status != -signal.SIGKILL or "STALE" in text:
            self.said.append(text)
        else:
            self.happened.update(line.split()[0] for line in text.splitlines() if line)


@pytest.mark.skipif("ROTA_STORM" not in os.environ, reason="minutes; with ROTA_STORM=1")
def test_nothing_is_torn_stale_or_left_after_a_storm_of_faults(
    own_home: Path, plane: Plane, actors: Crew, cases: Cases, tmp_path: Path
) -> None:
    seed = int(os.environ.get("ROTA_STORM_SEED", "7"))
    storm = Storm(own_home, tmp_path, actors, rng := random.Random(seed))
    faults = ["process"] * FAULTS + ["registry"] * REGISTRY_FAULTS
    rng.shuffle(faults)
    for at in range(0, len(faults), A_ROUND):
        storm.begin()
        for fault in faults[at : at + A_ROUND]:
            time.sleep(rng.random() * 0.05)
            storm.disturb_a_process() if fault == "process" else storm.disturb_the_registry(plane)
        storm.end()
        assert storm.said == [], f"seed {seed}, fault {at}: {dict(storm.happened)}\n" + "\n".join(storm.said)
        plane.gc()
        cases.done(5, plane)
    print(seed, dict(storm.happened))
