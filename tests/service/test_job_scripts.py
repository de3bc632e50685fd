"""Shell scripts with #ROTA and #SBATCH lines: what they become, and what is refused where."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.service.cli import app
from rota.service.jobfile.reader import read_job
from rota.service.jobfile.scripts import script_body
from rota.spec.errors import JobFileError
from rota.spec.job import JobSpec


def job(text: str, filename: str = "train.sh") -> JobSpec:
    body = script_body(text, filename=filename, workdir="/w")
    return read_job(body["source"], filename=filename, sets=body["sets"])


def problems(text: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        job(text)
    return [str(problem) for problem in caught.value.problems]


def test_a_slurm_head_becomes_a_job_of_one_world() -> None:
    spec = job(
        "#!/bin/bash\n#SBATCH -J big-one -p research\n#SBATCH --nodes=2\n#SBATCH -n4 -c 8   # four tasks\n"
        "#SBATCH --time=1-02:30 --mem=64G\n#SBATCH --gres=gpu:h100:2 --requeue --signal=B:USR1@90\n"
        "echo start\n#SBATCH --too-late\n"
    )
    role = spec.role("main")
    assert (spec.name, spec.queue, spec.retry, spec.grace_s) == ("big-one", "research", 1, 90.0)
    assert spec.time_limit_s == 86400 + 2 * 3600 + 30 * 60
    assert (role.mesh, role.replicas_min) == ((("dp", 4),), 4)
    assert (role.res.cpus, role.res.gpus, role.res.gpu_type, role.res.memory_bytes) == (8.0, 2.0, "h100", 64 * 2**30)
    assert (role.run, role.shell) == (("bash", "train.sh"), False)


def test_a_dependency_of_slurm_becomes_after() -> None:
    spec = job("#SBATCH -d afterok:prep-1:prep-2,afterany:clean-1\n")
    assert [(one.job, one.when) for one in spec.after] == [
        ("prep-1", "succeeded"),
        ("prep-2", "succeeded"),
        ("clean-1", "ended"),
    ]
    assert "is not afterok:JOB or afterany:JOB" in problems("#SBATCH --dependency=singleton\n")[0]


def test_rota_lines_name_fields_and_short_words() -> None:
    spec = job("#ROTA gpus=2\n#ROTA memory=1GiB\n#ROTA labels.team=vision\n\n# words\npython t.py\n", "9 x.sh")
    assert (spec.name, spec.role("main").res.gpus, dict(spec.labels)) == ("run-9-x", 2.0, {"team": "vision"})


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("0-0:0:5", 5)]
)
def test_times_are_slurms(text: str, seconds: float) -> None:
    assert job(f"#SBATCH -t {text}\n").time_limit_s == seconds


def test_what_has_no_meaning_is_refused_at_its_place_with_a_way_out() -> None:
    assert problems(
        "#!/bin/bash\n#SBATCH --array=1-10 -C a100\n#SBATCH -o out.txt --job-nam=x\n#SBATCH --mem=lots\n#ROTA gpus\n"
        "#SBATCH --time=soon\n#SBATCH -A lab --mem-per-cpu=4G\nsrun python t.py\n"
    ) == [
        "train.sh:2:9: --array has no meaning here; one job for each value: rota run --sweep task=1..10",
        "train.sh:2:22: --constraint has no meaning here; ask for the type with the devices: --gres=gpu:A100:1; no "
        "other feature of a node is asked for",
        "train.sh:3:9: --output has no meaning here; Rota keeps the output: rota logs JOB",
        "train.sh:3:20: --job-nam has no meaning here; did you mean 'job-name'?",
        "train.sh:4:9: --mem: 'lots' is not a size such as 512M or 64G",
        "train.sh:5:7: 'gpus' is not key=value; for example #ROTA gpus=2",
        "train.sh:6:9: --time: 'soon' is not a time such as 90, 1:30:00 or 1-12",
        "train.sh:7:9: --account has no meaning here; queues take the place of accounts: rota run -q QUEUE, or #SBATCH "
        "--partition=QUEUE",
        "train.sh:7:16: --mem-per-cpu has no meaning here; give the memory of one task: #SBATCH --mem=16G",
        "train.sh:8:1: srun has no meaning here; every task runs the script itself: write the command without srun",
    ]


def test_a_mistake_in_a_slurm_head_is_reported_at_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\n#SBATCH --partition=a//b\n#ROTA cpus=many\npython train.py\n")
    assert app.call(["run", str(script), "--check"]) == 2
    said = capsys.readouterr().err
    assert f"{script}:2:9: queue: 'a//b' is not a queue" in said
    assert f"{script}:3:7: roles.main.resources.cpus: expected a number, at least 0, got 'many'" in said
    assert "--set" not in said


def test_a_shell_line_as_one_word_names_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.call(["run", "--", "echo a | tr a b"]) == 2
    assert (
        "one word, not a program with arguments\n      rota run -- sh -c 'echo a | tr a b'" in capsys.readouterr().err
    )
    assert app.call(["run", "--", "python train.py " + "x" * 300]) == 2
    assert "one word, not a program with arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("torchrun --nproc-per-node 2 trian.py --lr 1", "has no trian.py; did you mean 'train.py'?"),
        ("python -u trian.py", "has no trian.py; did you mean 'train.py'?"),
        ("python made/by_setup.py", "has no made/by_setup.py; it has to be there when the job starts"),
        ("torchrun train.py", ""),
        ("python -m trian", ""),
        ("python $CODE/trian.py", ""),
        ("cd sub && python trian.py", ""),
    ],
)
def test_a_script_that_is_not_there_yet_is_noted_and_the_job_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: str, said: str
) -> None:
    monkeypatch.setenv("ROTA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROTA_PORT", "0")
    (tmp_path / "train.py").touch()
    job = tmp_path / "job.yaml"
    job.write_text(f"name: t\nroles: {{m: {{run: '{run}', setup: 'true', resources: {{gpus: 0}}}}}}\n")
    for how in ("--check", "--dry-run"):
        assert app.call(["run", str(job), how]) == 0
        err = capsys.readouterr().err
        assert (f"note: roles.m.run: {tmp_path} {said}" in err) if said else ("roles.m.run" not in err)
