"""Sweeps: points, survivors, the table; submitted, killed and continued without a job lost or repeated."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standing import Standing, listening, with_service
from test_cli import own_home, rota, with_cli
from tests.makers import format_line

from rota.service.api import command_of
from rota.service.jobfile.models import JobPart
from rota.service.jobfile.reader import read_job
from rota.service.sweeps import (
    Metric,
    budgets,
    job_of,
    parse_parameter,
    plot,
    point_of,
    points,
    survivors,
    sweep_document,
    unread,
    value_in,
)
from rota.spec.errors import BadInput
from rota.spec.events import JobEnded
from rota.spec.ids import JobId
from rota.spec.reasons import Reason
from rota.spec.states import JobState

assert own_home  # the fixture of every test here, too

SOURCE = "name: tune\nlabels: {team: a}\nroles: {main: {run: 'echo loss=$lr'}}\n"
FIELDS = tuple(field.alias or name for name, field in JobPart.model_fields.items())


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_and_the_last_parameter_changes_fastest() -> None:
    grid = points([parse_parameter("lr=1e-4,3e-4"), parse_parameter("seed=1..3")], None, "")
    assert [(one["lr"], one["seed"]) for one in grid] == [(lr, s) for lr in ("1e-4", "3e-4") for s in "123"]


def test_a_comma_in_brackets_is_a_part_of_its_value() -> None:
    assert parse_parameter("roles.a.mesh={dp: 1, tp: 2},{dp: 2}").values == ("{dp: 1, tp: 2}", "{dp: 2}")
    assert parse_parameter("roles.a.args=[1,2],[3,4]").values == ("[1,2]", "[3,4]")


def test_samples_differ_repeat_and_begin_alike() -> None:
    asked = [parse_parameter("lr=log:1e-5..1e-1"), parse_parameter("depth=1..9")]
    drawn = points(asked, 30, "tune")
    assert len({tuple(one.items()) for one in drawn}) == 30
    assert drawn == points(asked, 30, "tune") and drawn[:10] == points(asked, 10, "tune") != points(asked, 10, "other")
    rates = [float(one["lr"]) for one in drawn]
    assert all(1e-5 <= rate <= 1e-1 for rate in rates) and 8 <= sum(rate < 1e-3 for rate in rates) <= 22


def test_a_range_of_fractions_is_drawn_evenly_and_listed_values_as_they_are_written() -> None:
    drawn = points([parse_parameter("rate=0.1..0.5"), parse_parameter("kind=a,b")], 40, "tune")
    rates = [float(one["rate"]) for one in drawn]
    assert all(0.1 <= rate <= 0.5 for rate in rates) and 10 <= sum(rate < 0.3 for rate in rates) <= 30
    assert {one["kind"] for one in drawn} == {"a", "b"}


def test_as_many_samples_as_points_or_more_are_the_whole_grid_in_order() -> None:
    for samples in (4, 9):
        grid = points([parse_parameter("a=1,2"), parse_parameter("b=x,y")], samples, "")
        assert [one["a"] + one["b"] for one in grid] == ["1x", "1y", "2x", "2y"]


@pytest.mark.parametrize("text", ["", ":max", "loss:least"])
def test_a_metric_has_a_name_and_a_direction(text: str) -> None:
    assert str(Metric.parse("loss")) == "loss:min" and str(Metric.parse("score:max")) == "score:max"
    with pytest.raises(BadInput, match="not a metric"):
        Metric.parse(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["lr"], "--sweep lr: not NAME=VALUES"),
        (["lr="], "not NAME=VALUES"),
        (["lr=1,1"], "--sweep lr=1,1: a value is empty or given twice"),
        (["lr=1,"], "empty or given twice"),
        (["lr=5..1"], "from a lower to a higher number"),
        (["lr=log:0..1"], "above 0"),
        (["lr=1..2..3"], "not a range of numbers"),
        (["lr=0..1.2.3"], "not a range of numbers"),
        (["n=1..1000000"], "more than 2000 values"),
        (["a=1..1000", "b=1..1000"], "more than 2000 points"),
        (["lr=0.1..0.2"], "--sweep lr: a range of fractions has no last value"),
        (["a=1", "a=2"], "--sweep a: given twice"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(given: list[str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        points([parse_parameter(one) for one in given], None, "")
    assert said in str(caught.value)


def test_a_name_with_a_dot_or_of_a_field_changes_the_file_and_any_other_is_a_variable() -> None:
    made = job_of("tune", {"lr": "0.1", "seed": "3", "roles.a.replicas": "2"}, FIELDS, rung=None, metric=None)
    assert made.sets[:3] == ("env.lr=0.1", "seed=3", "roles.a.replicas=2")
    assert made.sets[-1] == "name=tune.lr-0_1.seed-3.replicas-2"
    for name in ("name", "a-b"):
        with pytest.raises(BadInput, match=f"--sweep {name}"):
            job_of("tune", {name: "1"}, FIELDS, rung=None, metric=None)


def test_keys_and_names_follow_from_the_point_and_long_names_are_cut() -> None:
    both = ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    one, same = (job_of("s", point, (), rung=None, metric=None) for point in both)
    assert one.key == same.key
    keys = {job_of("s", {"a": "1"}, (), rung=rung, metric=None).key for rung in (None, 0, 1)}
    assert len(keys | {one.key}) == 4
    long = job_of("s" * 60, {"a": "x" * 60}, (), rung=None, metric=None).sets[-1].removeprefix("name=")
    assert len(long) <= 63 and long.startswith("s" * 40)


def test_a_point_comes_back_from_its_label() -> None:
    point = {"lr": "1e-4", "text": "a b, c", "roles.a.mesh": "{dp: 2}"}
    made = job_of("s", point, FIELDS, rung=None, metric=None)
    label = next(one for one in made.sets if one.startswith("labels.sweep_point="))
    assert point_of({"sweep_point": label.partition("=")[2]}) == point
    assert point_of({"sweep_point": "'"}) == {}


def test_of_n_points_those_survive_that_the_next_budget_pays_for() -> None:
    ran = [({"lr": str(n)}, float(n)) for n in range(9)]
    assert [one["lr"] for one in survivors(ran, Metric(name="loss"), 1, 3)] == ["0", "1", "2"]
    assert [one["lr"] for one in survivors(ran, Metric(name="score", goal="max"), 1, 4.5)] == ["8", "7"]
    assert [one["lr"] for one in survivors(ran[:2], Metric(name="loss"), 1, 100)] == ["0"]


def test_a_point_without_a_number_never_survives() -> None:
    ran = [({"lr": "a"}, None), ({"lr": "b"}, math.nan), ({"lr": "c"}, math.inf), ({"lr": "d"}, 7.0)]
    assert survivors(ran, Metric(name="loss"), 1, 2) == ({"lr": "d"},)
    assert survivors(ran[:3], Metric(name="loss"), 1, 2) == ()


@pytest.mark.parametrize("text", ["epochs=1", "epochs=3,1", "epochs=a,b", "epochs=0,1", "epochs=0.1..0.2"])
def test_budgets_grow(text: str) -> None:
    with pytest.raises(BadInput, match=f"--budget {text}: expected growing numbers"):
        budgets(text)


def test_a_budget_that_is_not_written_as_one_names_its_flag() -> None:
    with pytest.raises(BadInput, match="--budget epochs: not NAME=VALUES"):
        budgets("epochs")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("step 3 loss=0.5 val_loss=0.9", 0.5),
        ("loss: 1e-3", 1e-3),
        ('{"loss": 2.5, "x": 1}', 2.5),
        ("loss 4", 4.0),
        ("loss=0.1 loss=0.2", 0.2),
        ("val_loss=3", None),
        ("lossy=3", None),
        ("loss=0.3x", None),
        ("loss=-inf", -math.inf),
    ],
)
def test_the_last_number_of_a_metric_in_the_output(line: str, value: float | None) -> None:
    assert value_in([line], "loss") == value


def row(job: str, lr: str, value: float | None, state: str = "SUCCEEDED", rung: int | None = None) -> Any:
    return {"job": job, "state": state, "rung": rung, "point": {"lr": lr}, "value": value, "run_s": 1.0}


def test_the_best_is_of_the_last_rung_and_succeeded() -> None:
    rows = [row("a", "1", 0.1, rung=0), row("b", "1", 0.5, rung=1), row("c", "2", 0.4, "FAILED", rung=1)]
    document = sweep_document("s", [*rows, row("d", "3", None, rung=1)], Metric(name="loss"))
    assert document["best"] is not None and document["best"]["job"] == "b"
    assert [one["job"] for one in document["items"]] == ["c", "b", "d", "a"]
    assert document["states"] == {"FAILED": 1, "SUCCEEDED": 3}
    assert (document["kind"], document["metric"], document["goal"]) == ("Sweep", "loss", "min")
    without = sweep_document("s", rows, None)
    assert (without["best"], without["metric"], without["goal"]) == (None, None, None)


def test_a_plot_has_a_row_for_each_value_in_numeric_order() -> None:
    rows = [row("a", "10", 4.0), row("b", "9", 0.0), row("c", "9", 2.0), row("d", "x", None), row("e", "9", math.inf)]
    lines = plot(sweep_document("s", rows, Metric(name="loss")), "lr")
    assert lines[0] == "loss by lr, from 0 to 4"
    assert [line.split("|")[0].strip() for line in lines[1:]] == ["9", "10"]
    assert lines[1].split("|")[1] == f"{'-' * 10}o{'-' * 10}{' ' * 19}" and lines[1].endswith(" 1")
    assert lines[2].split("|")[1] == f"{' ' * 39}o"


def test_one_value_alone_has_no_plot() -> None:
    assert plot(sweep_document("s", [row("a", "1", 4.0), row("b", "1", 5.0)], Metric(name="loss")), "lr") == []


def test_many_numbers_are_plotted_in_twelve_ranges() -> None:
    rows = [row(str(n), str(n / 7), float(n)) for n in range(50)]
    lines = plot(sweep_document("s", rows, Metric(name="loss")), "lr")
    assert len(lines) == 13 and all(".." in line for line in lines[1:])


def test_a_mistake_in_a_value_is_named_by_the_flag_it_came_by_and_one_of_set_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(SOURCE)
    run = ("run", "job.yaml", "--dry-run", "--sweep", "lr=1,2")
    gpus = rota(*run, "--sweep", "roles.main.resources.gpus=1,x")
    assert (gpus.status, "--set" in gpus.err) == (2, False)
    assert "--sweep roles.main.resources.gpus=x: roles.main.resources.gpus: expected a number" in gpus.err
    field = rota(*run, "--sweep", "rolez.main=1,2")
    assert "--sweep rolez.main=1: rolez: unknown field; did you mean 'roles'?" in field.err
    assert "--set #1:1:10: priority: expected" in rota(*run, "--set", "priority=y").err


def test_a_name_that_is_nearly_a_field_is_refused_unless_the_job_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: a\nroles: {main: {run: 'python x.py $seeds'}}\n")
    run = ("run", "job.yaml", "--dry-run", "--metric", "loss", "--json")
    for flags in (("--sweep", "prioritty=1,2"), ("--sweep", "lr=1,2", "--budget", "prioritty=1,2")):
        typo = rota(*run, *flags)
        assert typo.status == 2 and f"{flags[-2]} prioritty: not a field of the job file" in typo.err
        assert f"did you mean 'priority'? A variable of that name: {flags[-2]} env.prioritty=..." in typo.err
    for name in ("env.prioritty", "seeds", "steps", "dataset", "lr"):
        taken = rota(*run, "--sweep", f"{name}=1,2")
        assert taken.status == 0 and f"env.{name.removeprefix('env.')}=2" in taken.document["items"][1]["sets"]
    assert unread(["seeds", "lr", "seed", "roles.main.args.x"], FIELDS, "run: x $seeds") == ["lr"]


def test_a_command_without_a_shell_gets_the_values_of_the_point() -> None:
    def commands(*words: str, sweep: str = "lr=0.1,0.3") -> list[str]:
        done = rota("run", "-n", "fit", "--sweep", sweep, "--dry-run", "--json", "--", *words)
        assert done.status == 0, done.err
        body = command_of(words)
        specs = [
            read_job(body["source"], filename="x", sets=[*body["sets"], *one["sets"]]) for one in done.document["items"]
        ]
        assert [dict(spec.env)["lr"] for spec in specs] == ["0.1", "0.3"]
        return [shlex.join(spec.roles[0].run or ()) for spec in specs]

    words = ("python", "train.py", "--lr", "$lr", "--out=run-${lr}/é", "$lr_max", "$HOME")
    for sweep in ("lr=0.1,0.3", "env.lr=0.1,0.3"):
        assert commands(*words, sweep=sweep) == [
            shlex.join(["python", "train.py", "--lr", lr, f"--out=run-{lr}/é", "$lr_max", "$HOME"])
            for lr in ("0.1", "0.3")
        ]
    assert commands("sh", "-c", "echo $lr") == [shlex.join(["sh", "-c", "echo $lr"])] * 2, "the shell does it"


# -- with a service ---------------------------------------------------------------------------------------------------


async def jobs_of(service: Standing, sweep: str = "tune") -> list[dict[str, Any]]:
    return (await service.get("/jobs", all=True, label=f"sweep={sweep}"))["items"]


async def end(service: Standing, job: str, loss: float | None, *, failed: bool = False) -> None:
    """The job ends; a loss is in the last line of its output."""
    await service.play_start(job, "main/0")
    state, reason = (JobState.FAILED, Reason.USER_ERROR) if failed else (JobState.SUCCEEDED, Reason.COMPLETED)
    if loss is not None:
        logs = service.app.home.job(JobId(job)).logs
        logs.mkdir(exist_ok=True)
        (logs / "main-0.log").write_text(format_line(1.0, 1, 1, "out", f"step 1 loss={loss} lr=3"))
    await service.seen(service.as_master(job, JobEnded(state=state, reason=reason)))


@pytest.mark.slow
def test_the_same_command_again_adds_only_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SOURCE)
    words = ["run", "job.yaml", "--sweep", "lr=1,2", "--metric", "loss"]

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        first = await ask(*words)
        assert first.status == 0 and "tune: 2 jobs submitted, 0 there already" in first.err
        assert "in its environment" not in first.err
        assert (await jobs_of(service))[0]["labels"] | {"team": "a"} == (await jobs_of(service))[0]["labels"]
        again = await ask(*words)
        assert "tune: 0 jobs submitted, 2 there already" in again.err and len(await jobs_of(service)) == 2
        more = await ask(*words[:2], "--sweep", "lr=1,2,3", *words[4:])
        assert "tune: 1 job submitted, 2 there already" in more.err
        other = await ask("run", "job.yaml", "--sweep", "lr=1,2")
        assert (other.status, "another file, folder, metric or --set\n      -n NAME" in other.err) == (2, True)
        assert (await ask(*words, "-n", "other")).status == 0 and len(await jobs_of(service, "other")) == 2
        listed = (await ask("sweep", "--json")).document
        assert [(one["sweep"], one["jobs"]) for one in listed["items"]] == [("other", 2), ("tune", 3)]
        assert (await ask("sweep", "none")).status == 2
        noted = await ask("run", "job.yaml", "--sweep", "steps=1,2", "-n", "noted")
        assert "each job has $steps in its environment; nothing in the job file names it" in noted.err

    with_cli(tmp_path / "service", test)


def test_the_table_has_the_best_first_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SOURCE)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await ask("run", "job.yaml", "--sweep", "lr=1,2,3", "--metric", "loss")
        for number, loss in ((1, 0.3), (2, 0.1), (3, None)):
            await end(service, f"tune.lr-{number}-1", loss, failed=loss is None)
        document = (await ask("sweep", "tune", "--json")).document
        assert [(one["point"], one["value"]) for one in document["items"]] == [
            ({"lr": "2"}, 0.1),
            ({"lr": "1"}, 0.3),
            ({"lr": "3"}, None),
        ]
        assert (document["best"]["job"], document["states"]) == ("tune.lr-2-1", {"SUCCEEDED": 2, "FAILED": 1})
        page = (await ask("sweep", "tune")).out
        assert "best: tune.lr-2-1  lr=2  loss=0.1" in page and "loss by lr, from 0.1 to 0.3" in page
        misspelt = (await ask("sweep", "tune", "--metric", "los")).out
        assert "no job reported 'los'; --metric NAME compares by another name" in misspelt
        most = (await ask("sweep", "tune", "--metric", "loss:max", "--json")).document
        assert most["best"]["job"] == "tune.lr-1-1"

    with_cli(tmp_path / "service", test)


@pytest.mark.slow
def test_a_halving_is_continued_from_what_ended(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SOURCE)
    words = ["run", "job.yaml", "--sweep", "lr=1..4", "--metric", "loss", "--budget", "epochs=1,2,4", "-w"]

    async def until(service: Standing, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while len(found := await jobs_of(service)) < count:
                await asyncio.sleep(0.02)
        return found

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        gone = await ask(*words, "--timeout", "1ms")
        assert gone.status == 5 and len(await jobs_of(service)) == 4
        running = asyncio.ensure_future(ask(*words))
        for number in range(1, 5):
            await end(service, f"tune.lr-{number}.epochs-1.rung-0-1", float(number))
        second = await until(service, 6)
        assert {one["labels"]["sweep_point"] for one in second[:2]} == {"lr=1 epochs=2", "lr=2 epochs=2"}
        await end(service, "tune.lr-1.epochs-2.rung-1-1", 0.9)
        await end(service, "tune.lr-2.epochs-2.rung-1-1", 0.2)
        assert (await until(service, 7))[0]["labels"]["sweep_point"] == "lr=2 epochs=4"
        await end(service, "tune.lr-2.epochs-4.rung-2-1", 0.1)
        done = await running
        assert done.status == 0 and "best: tune.lr-2.epochs-4.rung-2-1  lr=2, epochs=4  loss=0.1" in done.out
        again = await ask(*words)
        assert again.status == 0 and len(await jobs_of(service)) == 7
        refused = await ask(*words[:-1], "-d")
        assert refused.status == 2 and "each rung waits" in refused.err

    with_cli(tmp_path / "service", test)


CLONED = """\
name: first
priority: 20
workdir: code
env: {A: x}
labels: {team: a, sweep: tune, sweep_point: lr=1}
time_limit: 2h
roles: {main: {run: [echo, 'a b'], replicas: {min: 1, max: 2}, resources: {gpus: 2, memory: 1GiB}}}
"""


def test_a_clone_is_the_job_as_it_is_now_with_changes_and_in_no_sweep(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        (tmp_path / "code").mkdir()
        await service.submit(CLONED, workdir=str(tmp_path))
        assert (await ask("set", "first-1", "priority=30")).status == 0
        made = await ask("clone", "first-1", "--set", "env.B=y", "-n", "second", "--json")
        assert (made.status, made.document["id"], made.document["workdir"]) == (0, "second-1", str(tmp_path / "code"))
        old, new = [(await service.get(f"/jobs/{job}/spec"))["spec"] for job in ("first-1", "second-1")]
        changed = {"name": "second", "workdir": None, "labels": [["team", "a"]], "env": [["A", "x"], ["B", "y"]]}
        assert new == {**old, **changed} and new["priority"] == 30
        again = (await ask("clone", "second-1", "--json")).document
        assert (again["id"], again["workdir"]) == ("second-2", str(tmp_path / "code"))
        wrong = await ask("clone", "first-1", "--set", "priority=x", "--set", "rolls.main.cpus=1")
        assert wrong.status == 2 and "--set #1:1:10: priority" in wrong.err and "did you mean 'roles'" in wrong.err
        assert (await ask("clone", "none")).status == 2
        idle = await ask("clone", "first-1", "--timeout", "5s")
        assert idle.status == 2 and "--timeout 5s is how long to wait, and nothing waits" in idle.err

    with_cli(tmp_path / "service", test)


@pytest.mark.slow
def test_killed_with_its_service_a_sweep_of_twenty_is_continued_without_a_job_lost_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SOURCE)
    words = ["run", "job.yaml", "--sweep", "lr=1..4", "--sweep", "seed=1..5"]

    async def command(service: Standing, kill_at: int) -> int:
        """Exit status of the command; it is killed once there are ``kill_at`` jobs."""
        async with listening(service) as http:
            server = ["--server", str(http.base_url).rstrip("/"), "--token", http.headers["authorization"].split()[1]]
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "rota", *server, *words, cwd=tmp_path)
            async with asyncio.timeout(120):
                while process.returncode is None and len(await jobs_of(service)) < kill_at:
                    await asyncio.sleep(0.01)
                if process.returncode is None and kill_at <= 20:
                    process.kill()
                return await process.wait()

    async def killed(service: Standing) -> None:
        assert await command(service, 4) == -9
        assert 4 <= len(await jobs_of(service)) < 20

    async def continued(service: Standing) -> None:
        before = {one["id"] for one in await jobs_of(service)}
        assert await command(service, 21) == 0
        found = await jobs_of(service)
        assert before < {one["id"] for one in found}
        counts = Counter(one["labels"]["sweep_point"] for one in found)
        assert len(counts) == 20 and set(counts.values()) == {1}

    with_service(tmp_path / "service", killed)
    with_service(tmp_path / "service", continued)
