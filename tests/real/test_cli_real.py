"""The command line as people use it: processes, a terminal, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.real.jobs import deep
from tests.runtime.images import small_image

from rota.runtime.environ import Home
from rota.service.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 240.0
JOB = """\
name: talk
roles:
  main:
    run: "echo one; while ! test -e GATE; do sleep 0.1; done; echo two"
"""


class Installation:
    """A private home, and the command ``rota`` in it."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self.folder = home, folder
        self.env = {**os.environ, "ROTA_HOME": str(home), "ROTA_PORT": "0", "TERM": "xterm"}
        self.env.pop("ROTA_SERVER", None)
        self.command = [sys.executable, "-m", "rota"]

    def rota(
        self, *words: str, stdin: str | None = None, timeout_s: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *words],
            input=stdin,
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def client(self) -> Client:
        """Asks what a command would, at a hundredth of its processor time."""
        record = json.loads(Home.of(self.home).service_record.read_text())
        return Client(record["url"], Home.of(self.home).token.read_text().strip())

    def processes(self) -> list[psutil.Process]:
        """Every process that was started with this home in its environment, this test's own apart."""
        found: list[psutil.Process] = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get("ROTA_HOME") == str(self.home) or str(self.home) in " ".join(one.cmdline()):
                    found.append(one)
        return found


@pytest.fixture
def installation(engine_home: Path, tmp_path: Path) -> Iterator[Installation]:
    made = Installation(engine_home, tmp_path)
    yield made
    made.rota("down", "--force")


class OnTerminal:
    """A command on a terminal of its own."""

    def __init__(self, installation: Installation, *words: str) -> None:
        self.text = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests themselves run in the background
            os.chdir(installation.folder)
            os.execve(sys.executable, [*installation.command, *words], installation.env)

    def until(self, pattern: str) -> str:
        """Read until the pattern was printed."""
        end = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.text):
            assert time.monotonic() < end, f"no {pattern!r} in:\n{self.text}"
            if select.select([self.fd], [], [], 0.5)[0]:
                try:
                    self.text += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
        assert re.search(pattern, self.text), f"no {pattern!r} in:\n{self.text}"
        return self.text

    def end(self) -> int:
        """Read to the end; the exit status."""
        with contextlib.suppress(OSError):
            while chunk := os.read(self.fd, 4096):
                self.text += chunk.decode(errors="replace")
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_run_follows_on_a_terminal_and_ctrl_c_detaches_while_the_job_goes_on(installation: Installation) -> None:
    (installation.folder / "job.yaml").write_text(JOB)
    run = OnTerminal(installation, "run", "job.yaml")
    run.until(r"starting the service of this machine")
    run.until(r"main/0 \|.*one")
    os.kill(run.pid, signal.SIGINT)
    run.until(r"detached; talk-1 keeps running")
    assert run.end() == 130
    assert "rota logs -f talk-1" in run.text and "Traceback" not in run.text

    follow = subprocess.Popen(
        [*installation.command, "logs", "-f", "talk-1", "--json"],
        env=installation.env,
        cwd=installation.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    (installation.folder / "GATE").touch()
    out, _ = follow.communicate(timeout=LIMIT_S)
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["one", "two"]
    assert follow.returncode == 0
    shown = json.loads(installation.rota("show", "talk-1", "--json").stdout)
    assert shown["state"] == "SUCCEEDED"


def test_a_script_that_raises_at_the_same_line_is_tried_three_times_whatever_its_window(
    installation: Installation,
) -> None:
    """The window forgets each failure before the next one, so it would be tried for ever."""
    bug = f"import os\nimport time\n\ntime.sleep(1.1)\nprint('a try of', os.getpid(), flush=True)\n{'raise ValueError'}"
    (installation.folder / "bug.py").write_text(f"{bug}(f'no column {{os.getpid()}}')\n")
    job = "name: typo\nretry: 4\nroles:\n  main: {run: python bug.py, fail: {limit: 3/1s}}\n"
    (installation.folder / "job.yaml").write_text(job)
    ran = installation.rota("run", "-w", "job.yaml")
    ended = "gave up after 3 tries: the same ValueError at bug.py:6 each time"
    assert ran.returncode == 1 and ended in ran.stderr and "healed" not in ran.stderr, ran.stderr
    assert installation.rota("logs", "typo-1").stdout.count("a try of") == 3
    failures = json.loads(installation.rota("failures", "typo-1", "--json").stdout)
    assert [one["healed"] for one in failures["items"]] == [False, False]
    assert re.search(r"recoveries +2, see: ", installation.rota("show", "typo-1").stdout), "none after the third try"
    assert failures["end"]["text"] == ended and 'bug.py", line 6' in failures["end"]["traceback"]
    assert json.loads(installation.rota("alerts", "--json").stdout)["items"] == []


@deep
def test_ctrl_c_ends_what_follows_and_the_service_in_the_foreground(installation: Installation) -> None:
    service = OnTerminal(installation, "up", "--foreground", "--pretend", "1x1x2")
    service.until("Ctrl-C ends it")
    until = time.monotonic() + LIMIT_S
    while installation.rota("status").returncode:
        assert time.monotonic() < until, service.text
    assert installation.rota("run", "-d", "-n", "wait", "--", "sh", "-c", "echo begun; sleep 600").returncode == 0
    for words, shown in ((("logs", "-f", "wait-1"), "begun"), (("top",), "main/0")):
        follow = OnTerminal(installation, *words)
        follow.until(shown)
        os.kill(follow.pid, signal.SIGINT)
        assert (follow.end(), "Traceback" in follow.text) == (130, False), follow.text
    os.kill(service.pid, signal.SIGINT)
    assert (service.end(), "Traceback" in service.text) in ((0, False), (130, False)), service.text
    assert installation.rota("down").returncode == 0
    assert installation.processes() == []


def test_exit_statuses_are_those_of_the_jobs_and_down_leaves_no_process(installation: Installation) -> None:
    good = installation.rota("run", "-w", "-n", "good", "--", sys.executable, "-c", "print('hi')")
    assert (good.returncode, good.stdout) == (0, ""), good.stderr
    bad = installation.rota(
        "run", "-w", "-n", "bad", "--json", "--", sys.executable, "-c", "raise SystemExit('no luck')"
    )
    assert bad.returncode == 1, bad.stderr
    document = json.loads(bad.stdout)
    assert (document["kind"], document["state"]) == ("Job", "FAILED")
    assert "no luck" in installation.rota("logs", "bad-1").stdout
    status = installation.rota("status", "--json")
    assert (status.returncode, json.loads(status.stdout)["state"]) == (0, "ready")
    assert installation.processes()

    down = installation.rota("down", "--json")

    assert (down.returncode, json.loads(down.stdout)["state"]) == (0, "down")
    assert installation.processes() == []
    gone = installation.rota("ps")
    assert (gone.returncode, gone.stdout) == (3, "")
    assert "no Rota service runs for" in gone.stderr and "start it with 'rota up'" in gone.stderr


@pytest.mark.parametrize("template", ["torchrun", pytest.param("ppo", marks=deep)])
def test_a_template_runs_as_it_comes(installation: Installation, template: str) -> None:
    assert installation.rota("init", template).returncode == 0
    done = installation.rota("run", f"{template}/job.yaml", "-w")
    assert done.returncode == 0, done.stderr
    out = installation.rota("logs", "-f", "hello-1" if template == "torchrun" else "ppo-1").stdout
    assert ("WORLD_SIZE=2" if template == "torchrun" else "commit 40: reward") in out


@deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "needs", "figure", "least"),
    [
        ("grpo_sums", "reasoning_gym", "reward_after", 0.6),
        ("ppo_cartpole", "gymnasium", "greedy", 475.0),
        ("sft_stdlib", "torch", "share", 0.47),
        ("mm_digits", "sklearn", "right", 0.95),
        ("online_drift", "river", "accuracy", 0.898),
    ],
)
def test_an_example_gives_within_five_minutes_what_its_readme_states(
    installation: Installation, name: str, needs: str, figure: str, least: float
) -> None:
    """Each with roles that are killed: test_scenarios.py."""
    pytest.importorskip(needs)
    file = Path(__file__).resolve().parents[2] / "examples" / name / "job.yaml"
    done = installation.rota("run", str(file), "-w", "--json", timeout_s=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((Path(json.loads(done.stdout)["output"]) / "result.json").read_text())
    assert round(found[figure], 3) >= least
    assert found.get("share", 0.0) <= 0.48, "of the bits that the frequencies need"


TOYS = """
from rota.runtime.devices import DeviceFamily, DeviceFault
from rota.spec.resources import Device

class Toys(DeviceFamily):
    name = "toy"
    variable = "TOY_VISIBLE_DEVICES"

    def inventory(self):
        return tuple(Device(index=i, type="TOY1", memory_bytes=1 << 30) for i in range(4))

    def faults(self, devices):
        return [DeviceFault(index=2, text="too hot")]
"""


def test_devices_of_a_family_of_the_installation_are_given_out_and_shown_by_its_variable(
    installation: Installation,
) -> None:
    (installation.folder / "toys.py").write_text(TOYS)
    installation.env["PYTHONPATH"] = f"{installation.folder}:{installation.env.get('PYTHONPATH', '')}"
    (installation.home / "config.toml").write_text('device_families = "toys:Toys"\n')
    saw = 'run: "echo toys=$TOY_VISIBLE_DEVICES."'
    roles = (("one", 3, "gpus: 1, gpu_type: TOY1"), ("none", 1, "gpus: 0"))
    text = "".join(f"  {name}: {{{saw}, replicas: {n}, resources: {{{res}}}}}\n" for name, n, res in roles)
    (installation.folder / "job.yaml").write_text(f"name: toys\nroles:\n{text}")
    ran = installation.rota("run", "-w", "job.yaml")
    assert ran.returncode == 0, ran.stderr
    said = re.findall(r"(one|none)/.*toys=([\d,]*)\.", installation.rota("logs", "toys-1").stdout)
    assert sorted(said) == [("none", ""), ("one", "0"), ("one", "1"), ("one", "3")], "2 is unfit"
    (node,) = json.loads(installation.rota("nodes", "--json").stdout)["items"]
    assert [device["health"] for device in node["devices"]] == ["healthy", "healthy", "bad", "healthy"]
    assert node["labels"]["rota.unfit-devices"] == "device 2: too hot"
    (installation.folder / "more.yaml").write_text(f"name: more\nroles:\n{text.replace('replicas: 3', 'replicas: 4')}")
    more = installation.rota("run", "-w", "more.yaml", timeout_s=60.0)
    text = "asks 4 GPUs at once; the cluster has 3 GPUs in all"
    assert more.returncode == 4 and text in more.stderr, (more.returncode, more.stdout, more.stderr)


IMAGED = """\
name: boxed
image: {}
roles:
  main:
    setup: "cat /marker > found"
    run: "cat found; echo $FLAVOUR $ROTA_INSTANCE; echo x > $ROTA_OUTPUT_DIR/made; while ! test -e GATE; do sleep 0.1; done; exit 3"
    fail: {{limit: 0/10m, then: []}}
"""  # noqa: E501


def test_commands_of_a_job_with_an_image_run_in_it_and_one_that_cannot_be_pulled_ends_before_it_has_devices(
    installation: Installation, tmp_path: Path
) -> None:
    with small_image(tmp_path) as name:
        (installation.folder / "job.yaml").write_text(IMAGED.format(name))
        run = OnTerminal(installation, "run", "job.yaml")
        run.until(r"of the image[\s\S]*plain main/0")
        seen = installation.rota("exec", "boxed-1", "main/0", "--", "cat", "/marker")
        assert (seen.returncode, seen.stdout) == (0, "of the image\n"), seen.stderr
        (installation.folder / "GATE").touch()
        assert run.end() == 1
        job = json.loads(installation.rota("show", "boxed-1", "--json").stdout)
        assert (job["reason"], "exit status 3" in job["error"]["text"]) == ("EXIT_NONZERO", True)
        assert (installation.home / "jobs/boxed-1/output/made").read_text() == "x\n"
    lost = installation.rota("run", "-w", "job.yaml", "--set", "image=localhost/rota-nothing:1", "--json")
    job = json.loads(lost.stdout)
    assert (lost.returncode, job["reason"]) == (1, "IMAGE_PULL_FAILED") and "rota-nothing" in job["error"]["text"]
    events = json.loads(installation.rota("events", "boxed-2", "--json").stdout)["items"]
    assert "JobAdmitted" not in {event["kind"] for event in events}
