"""``plan: auto`` and plan files in a job file: what is searched, which sizes stay, what the dry run tells."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rota.job.core.placement import requests_of
from rota.job.core.resize import world_of
from rota.runtime.clock import SystemClock
from rota.runtime.environ import Home
from rota.runtime.random import SystemRandom
from rota.service.control import intake
from rota.service.control.changes import checked_size
from rota.service.control.intake import Intake
from rota.service.control.job_plans import with_plans
from rota.service.control.plan_hardware import PROCESS_BYTES, PlannedDevices
from rota.service.control.submission import Submission
from rota.service.jobfile.models import job_text
from rota.service.jobfile.reader import read_job
from rota.service.offline import plan_job
from rota.service.plans import FILE_BYTES_MAX, hardware_file, read_json
from rota.spec import codec
from rota.spec.errors import BadInput, Infeasible, JobFileError, LimitExceeded, TimedOut
from rota.spec.ids import NodeId
from rota.spec.job import JobSpec, RoleSpec, SizedPlan
from rota.spec.resources import Device, Node
from rota.testing.memory import VirtualClock
from rota.train.plan.hardware import A100_80G_DGX, LevelSpec, cpu_ranks
from rota.train.plan.importers import model_from_json
from rota.train.plan.model import Mesh, ParallelPlan, data_parallel

FILE = """
name: trains
roles:
  main:
    run: torchrun --nproc-per-node 2 train.py
    replicas: {min: 1, max: 4}
    resources: {memory: 8GiB}
    plan: auto
    model: {layers: 4, hidden: 256, heads: 4, seq: 128, vocab: 256, batch: 16}
"""
SPLIT = """\
name: rl
roles:
  main:
    workload: m:A
    mesh: {dp: "*"}
    replicas: {min: 1, max: 3}
    plan: auto
"""
NO_PLAN = FILE[: FILE.index("    plan")]


def planned(text: str, workdir: str = "") -> RoleSpec:
    return with_plans(read_job(text, filename="job.yaml"), workdir, SystemClock()).role("main")


def test_each_size_gets_the_best_plan_for_its_ranks_and_other_sizes_are_no_world() -> None:
    role = planned(FILE)
    assert {one.replicas for one in role.plans} <= {1, 2, 4}, "a batch of 16 and 4 layers have no plan for 6 ranks"
    for one in role.plans:
        plan = ParallelPlan.from_json(one.plan)
        assert (plan.mesh.world, plan.global_batch) == (2 * one.replicas, 16)
        assert "One step takes" in one.why and "Gap to the bound 0 %" in one.why
    assert [world_of(role, n) for n in (1, 2, 3, 4)] == [1, 2, 2, 4]


GPUS = """
name: trains
roles:
  main:
    run: torchrun --nproc-per-node 8 train.py
    replicas: 2
    resources: {gpus: 8, gpu_type: "TYPE"}
    plan: auto
    model: {layers: 32, hidden: 4096, heads: 32, seq: 4096, vocab: 32000, batch: 64}
"""
ANY = GPUS.replace(', gpu_type: "TYPE"', "")


def for_devices(text: str, **there: int) -> SizedPlan:
    nodes = [machine(name.replace("_", "-"), 8, gib) for name, gib in there.items() for _ in range(2)]
    [plan] = with_plans(read_job(text, filename="j"), "", SystemClock(), PlannedDevices.of(nodes)).role("main").plans
    return plan


def machine(kind: str, devices: int, gib: int = 80) -> Node:
    having = tuple(Device(index=i, type=kind, memory_bytes=gib * 2**30) for i in range(devices))
    return Node(id=NodeId(kind), host="h", cpus=64, memory_bytes=2**40, devices=having)


def step_s(plan: SizedPlan) -> float:
    found = re.search(r"One step takes ([\d.]+) s", plan.why)
    assert found is not None
    return float(found.group(1))


def test_a_plan_is_for_the_type_of_device_that_the_role_asks_for() -> None:
    a100, h100 = (for_devices(GPUS.replace("TYPE", kind)) for kind in ("A100", "H100"))
    named = for_devices(ANY.replace("batch: 64", "batch: 64, hardware: h100-96g"))
    assert step_s(h100) == step_s(named) < step_s(a100) / 2
    assert a100.why.endswith("Planned for a100-80g-dgx.") and h100.why.endswith("Planned for h100-96g.")


def test_a_device_with_less_memory_than_the_described_one_gets_a_plan_that_fits_it() -> None:
    def most(plan: SizedPlan) -> float:
        found = re.search(r"of ([\d.]+) GiB", plan.why)
        assert found is not None
        return float(found.group(1))

    assert most(for_devices(GPUS.replace("TYPE", "A100-SXM4-40GB"))) == 40, "as its name says"
    assert most(for_devices(GPUS.replace("TYPE", "H100"), H100=80)) == 80, "as the devices of the cluster have"


def test_of_several_types_the_plan_fits_all_and_says_whose_times_are_told() -> None:
    both = for_devices(GPUS.replace("TYPE", "A100|H100"))
    assert step_s(both) == step_s(for_devices(GPUS.replace("TYPE", "A100")))
    assert both.why.endswith("Planned for a100-80g-dgx, which has the least memory of A100 and H100: it fits them all.")


def test_a_type_without_a_description_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"roles\.main\.plan: devices of type V100 have no description") as told:
        for_devices(GPUS.replace("TYPE", "A100|V100"))
    assert "model.hardware" in told.value.hint and "h100-96g" in told.value.hint


def test_a_role_of_any_type_is_planned_for_what_the_cluster_has_and_a_guess_is_called_one() -> None:
    assert for_devices(ANY, H100=96).why.endswith("Planned for h100-96g.")
    assert "has the least memory of H100 and A100" in for_devices(ANY, H100=96, A100=80).why
    guess = for_devices(ANY, PRETEND=40)
    assert "of 40 GiB" in guess.why
    assert guess.why.endswith(
        "The role names no gpu_type and PRETEND devices have no description: planned for a100-80g-dgx; "
        "run rota plan calibrate on a node that has them, or name gpu_type or model.hardware."
    )
    assert "the cluster has no devices yet" in for_devices(ANY).why


def test_a_calibrated_file_of_the_installation_is_what_its_device_type_is_planned_with(tmp_path: Path) -> None:
    """A type that nothing is known of is refused; once a node was measured, the same job is planned with that."""
    there = PlannedDevices.of([machine("Quick 9", 8), machine("Quick 9", 8)], tmp_path)
    text = GPUS.replace("TYPE", "Quick 9")
    with pytest.raises(BadInput, match="devices of type Quick 9 have no description") as told:
        with_plans(read_job(text, filename="j"), "", SystemClock(), there)
    assert "rota plan calibrate" in told.value.hint
    tenfold = replace(A100_80G_DGX.device, peak_tflops={"bf16": 3120.0, "fp16": 3120.0, "fp32": 195.0})
    own = replace(A100_80G_DGX, name="measured", device=tenfold)
    hardware_file(tmp_path, "Quick 9").write_text(codec.dumps(own))
    [quick] = with_plans(read_job(text, filename="j"), "", SystemClock(), there).role("main").plans
    assert quick.why.endswith("Planned for Quick 9, as calibrated.")
    assert quick.step_s < step_s(for_devices(GPUS.replace("TYPE", "A100"))) / 2
    hardware_file(tmp_path, "Quick 9").write_text('{"name": "x"}')
    with pytest.raises(BadInput, match=r"roles\.main\.plan: hardware\.device: memory_gib and peak_tflops are required"):
        with_plans(read_job(text, filename="j"), "", SystemClock(), there)


def test_a_file_measured_on_one_node_keeps_the_shipped_links_between_nodes(tmp_path: Path) -> None:
    hardware_file(tmp_path, "A100").write_text(codec.dumps(replace(A100_80G_DGX, levels=A100_80G_DGX.levels[:1])))
    found = PlannedDevices.of([machine("A100", 8)], tmp_path).described("A100", 0)
    assert found is not None and found.levels == A100_80G_DGX.levels


def test_groups_of_a_plan_are_no_larger_than_the_nodes_that_there_are() -> None:
    """One rank an instance on devices of 24 GiB: groups of 8 on nodes of 8, of at most 2 where nodes have 2."""
    text = GPUS.replace("per-node 8", "per-node 1").replace("gpus: 8", "gpus: 1").replace("replicas: 2", "replicas: 8")
    text = text.replace("TYPE", "A100").replace("batch: 64", "batch: 16")

    def on(*nodes: Node) -> Mesh:
        [plan] = (
            with_plans(read_job(text, filename="j"), "", SystemClock(), PlannedDevices.of(nodes)).role("main").plans
        )
        mesh = ParallelPlan.from_json(plan.plan).mesh
        assert plan.together % mesh.tp == 0 and plan.close % plan.together == 0
        return mesh

    assert on(machine("A100", 8, 20)).tp > 2
    assert on(*[machine("A100", 2, 20)] * 4).tp <= 2
    role = read_job(text, filename="j").role("main")
    for nodes, most in (((8,), 8), ((4, 4), 4), ((4, 3, 2), 2), ((5, 3), 1), ((2, 2), 0), ((), 0)):
        there = PlannedDevices.of([machine("A100", n) for n in nodes])
        assert there.ranks_on_a_node(role, 1, 8) == most, f"nodes of {nodes}"


def test_context_groups_that_were_priced_inside_a_node_must_be_there() -> None:
    long = GPUS.replace("TYPE", "H100").replace("seq: 4096", "seq: 131072").replace("batch: 64", "batch: 2")
    long = long.replace("per-node 8", "per-node 1").replace("gpus: 8", "gpus: 1").replace("replicas: 2", "replicas: 8")
    plan = for_devices(long, H100=96)
    mesh = ParallelPlan.from_json(plan.plan).mesh
    assert mesh.cp > 1 and plan.together == mesh.tp * mesh.cp


def test_the_memory_of_the_plan_is_the_memory_that_the_role_asks() -> None:
    role = planned(FILE.replace("    resources: {memory: 8GiB}\n", ""))
    needs = max(one.memory_bytes for one in role.plans)
    assert needs > 2 * PROCESS_BYTES
    [request] = requests_of(JobSpec(name="j", roles=(role,)))
    assert {one.res.memory_bytes for one in request.bundles} == {needs}
    assert role.res.memory_bytes == 0, "it is no limit: a prediction ends no job"
    [request] = requests_of(JobSpec(name="j", roles=(planned(FILE),)))
    assert {one.res.memory_bytes for one in request.bundles} == {8 * 2**30}, "what the file says stays"


def test_devices_that_cannot_hold_the_plan_are_left_out_of_the_ask() -> None:
    text = ANY.replace("batch: 64", "batch: 64, hardware: a100-80g-dgx")

    def types(**there: int) -> str | None:
        nodes = PlannedDevices.of([machine(name, 8, gib) for name, gib in there.items()])
        return with_plans(read_job(text, filename="j"), "", SystemClock(), nodes).role("main").res.gpu_type

    assert types(A100=80, V100=16) == "A100"
    assert types(A100=80, H100=96) is None
    with pytest.raises(Infeasible, match=r"roles\.main\.plan: its fullest rank needs .* the devices have V100 16 GiB"):
        types(V100=16)


def test_a_plan_says_how_many_instances_hold_a_tensor_parallel_group(tmp_path: Path) -> None:
    """Ranks are dealt out to instances in order: groups of 4 on instances of 1, 2, 3 and 8 ranks."""
    mesh = Mesh(dp_replicate=6, cp=2, tp=4)
    plan = replace(data_parallel(layers=4, dp=6), mesh=mesh)
    (tmp_path / "plan.json").write_text(plan.to_json())
    text = NO_PLAN.replace("    replicas: {min: 1, max: 4}\n", "") + "    plan: plan.json\n"
    found = [planned(text.replace("-node 2", f"-node {n}"), str(tmp_path)).plans[0] for n in (1, 2, 3, 8)]
    assert [(one.together, one.close) for one in found] == [(4, 8), (2, 4), (4, 8), (1, 1)]


def test_instances_that_come_and_go_hold_whole_tensor_parallel_groups() -> None:
    """On devices of 24 GiB this model needs tensor parallelism; instances of one rank would share a group."""
    text = ANY.replace("per-node 8", "per-node 1").replace("gpus: 8", "gpus: 1")
    text = text.replace("batch: 64", "batch: 16, hardware: small.json")
    assert for_small(text.replace("replicas: 2", "replicas: 8")).together > 1
    assert for_small(text.replace("replicas: 2", "replicas: {min: 8, max: 9}")).together == 1


def for_small(text: str) -> SizedPlan:
    with TemporaryDirectory() as folder:
        fast = replace(A100_80G_DGX.levels[0], gb_s=5000.0, latency_us=1.0)
        small = replace(A100_80G_DGX.with_memory(24), levels=(fast, A100_80G_DGX.levels[1]))
        (Path(folder) / "small.json").write_text(codec.dumps(small))
        return with_plans(read_job(text, filename="j"), folder, SystemClock()).role("main").plans[0]


def test_a_size_that_is_not_faster_than_a_smaller_one_is_left_out(tmp_path: Path) -> None:
    """``hardware`` names a file beside the job file; on its links everything that is sent takes minutes."""
    link = replace(cpu_ranks(8, 2).levels[0], size=2), LevelSpec(name="far", gb_s=1e-6)
    (tmp_path / "slow.json").write_text(codec.dumps(replace(cpu_ranks(8, 2), levels=link)))
    role = planned(FILE.replace("batch: 16", "batch: 16, hardware: slow.json"), str(tmp_path))
    assert [one.replicas for one in role.plans] == [1]
    assert (role.replicas_min, role.replicas_max) == (1, 1)


def test_a_scaled_job_may_only_have_a_size_with_a_plan() -> None:
    role = planned(FILE)
    sizes = ", ".join(str(one.replicas) for one in role.plans)
    with pytest.raises(BadInput, match=f"main=3: the world of main is at least 1, one of {sizes}, which have plans"):
        checked_size(JobSpec(name="trains", roles=(role,)), "main", 3)
    assert checked_size(JobSpec(name="trains", roles=(role,)), "main", 2) == role


def test_no_plan_for_any_size_is_told_with_what_would_help() -> None:
    with pytest.raises(
        Infeasible, match=r"roles\.main\.plan: no plan for 2 to 8 ranks: batch 16.*0\.00488 GiB"
    ) as told:
        planned(FILE.replace("8GiB", "10MiB"))
    assert "more memory" in told.value.hint


class Ticking(VirtualClock):
    """A clock of which each look takes a second, from the given one on."""

    def __init__(self, calm: int = 0) -> None:
        super().__init__()
        self.looks, self._calm = 0, calm

    def monotonic_s(self) -> float:
        self.looks += 1
        return max(0.0, float(self.looks - self._calm))


def test_a_search_that_takes_too_long_is_no_refusal_and_sizes_that_it_did_not_reach_are_named() -> None:
    gpt3 = FILE.replace("layers: 4, hidden: 256, heads: 4", "layers: 96, hidden: 12288, heads: 96")
    with pytest.raises(TimedOut, match=r"roles\.main\.plan: no plan was found in 5 s for 1, 2, 3, 4 instances"):
        with_plans(read_job(gpt3.replace("8GiB", "640GiB"), filename="j"), "", clock := Ticking())
    assert clock.looks < 20
    one_size = read_job(FILE.replace("max: 4", "max: 1"), filename="j")
    with_plans(one_size, "", clock := Ticking(10**9))
    [cut_short] = with_plans(one_size, "", Ticking(clock.looks - 6)).role("main").plans
    assert re.search(r"Gap to the bound [\d.]+ %, \d+ settings, \d+ of them not looked into in time", cut_short.why)
    [plan] = with_plans(read_job(FILE, filename="j"), "", Ticking(clock.looks)).role("main").plans
    assert plan.replicas == 1 and plan.why.endswith("No plan was found in time for 2, 3, 4 instances.")


@pytest.mark.slow
def test_sixteen_sizes_of_a_model_of_175_billion_parameters_are_searched_to_the_end() -> None:
    """The work is counted, not timed: bounds, cuts and scores, each a look at the clock."""
    gpt3 = "{layers: 96, hidden: 12288, heads: 96, seq: 2048, vocab: 51200, batch: 512}"
    text = NO_PLAN.replace("per-node 2", "per-node 8").replace("max: 4", "max: 16").replace("memory: 8GiB", "gpus: 8")
    clock = Ticking(10**9)
    spec = with_plans(read_job(f"{text}    plan: auto\n    model: {gpt3}\n", filename="j"), "", clock)
    plans = spec.role("main").plans
    sizes = [one.replicas for one in plans]
    assert sizes == [3, *range(5, 17)], "nothing fits on 16 devices, and 32 are no faster than 24"
    assert all("Gap to the bound 0 %" in one.why and "in time" not in one.why for one in plans)
    assert clock.looks < 60_000


def test_a_model_beyond_all_measure_is_refused() -> None:
    with pytest.raises(BadInput, match=r"roles\.main\.plan: model\.layers: 20000 is above 10000"):
        planned(FILE.replace("layers: 4", "layers: 20000"))
    with pytest.raises(BadInput, match=r"model\.vocab: 9{400} is above"):
        model_from_json({"layers": 4, "hidden": 256, "heads": 4, "seq": 128, "vocab": int("9" * 400)})


def test_a_plan_file_gives_the_size_and_contradictions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(data_parallel(layers=4, dp=4).to_json())
    text = NO_PLAN.replace("    replicas: {min: 1, max: 4}\n", "") + "    plan: plan.json\n"
    role = planned(text, str(tmp_path))
    assert (role.replicas_min, role.replicas_max) == (2, 2)
    with pytest.raises(BadInput, match=r"roles\.main\.plan: plan.json is for 4 ranks, the role has 3 to 3 instances"):
        planned(text + "    replicas: 3\n", str(tmp_path))
    with pytest.raises(BadInput, match=r"roles\.main\.plan: .*No such file"):
        planned(text, str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["/etc/hosts", "../plan.json", "a/../../plan.json"])
def test_a_file_outside_the_folder_of_the_job_is_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "plan.json").write_text("[")
    (tmp_path / "job" / "a").mkdir(parents=True)
    for text in (NO_PLAN + f"    plan: {name}\n", FILE.replace("batch: 16", f"batch: 16, hardware: {name}")):
        for folder in (str(tmp_path / "job"), ""):
            with pytest.raises(BadInput, match=f"{name} is not below the folder of the job"):
                planned(text, folder)


def test_only_a_regular_file_of_a_bounded_size_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    for path, told in (("/dev/null", "not a regular file"), ("large", "larger than"), ("pipe", "not a regular file")):
        with pytest.raises(BadInput, match=told):
            read_json(tmp_path / path, "plan")


def test_a_job_waits_a_bounded_time_for_the_searches_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        state = SimpleNamespace(queues=SimpleNamespace(line_of=lambda queue: []))
        loop = SimpleNamespace(scheduler=SimpleNamespace(find_queue=lambda queue: None, state=state))
        door = Intake(cast("Any", loop), home=Home.find(), clock=SystemClock(), random_source=SystemRandom())
        await door._searches.acquire()
        with pytest.raises(LimitExceeded, match="plans of other jobs"):
            await door.plan(Submission(source=FILE), caller=None)

    monkeypatch.setattr(intake, "SEARCH_WAIT_S", 0.01)
    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NO_PLAN + "    plan: auto\n", r"job.yaml:8:11: roles.main.plan: auto needs 'model'"),
        (FILE.replace("auto", "plan.json"), r"roles.main.model: it is for 'plan: auto' only"),
        (FILE.replace("torchrun --nproc-per-node 2", "python"), r"a plan is for the ranks that torchrun starts"),
        (FILE.replace("batch: 16", "batsch: 16"), r"unknown field; did you mean 'batch'"),
        (FILE.replace("hidden: 256", "hidden: 0"), r"job.yaml:9:32: roles.main.model.hidden: expected a whole number"),
        (FILE + "    mesh: {dp: 1}\n", r"roles.main.mesh: there is a plan, too"),
        (SPLIT.replace("3}", "1}"), r"roles.main.plan: auto needs a range of members along one axis"),
        (
            SPLIT.replace("min: 1", "min: 2") + "    env: {ROTA_GLOBAL_BATCH: '9'}\n",
            r"2 members do not divide ROTA_GLOBAL",
        ),
        (SPLIT + "    model: {layers: 1, hidden: 8, heads: 1, seq: 8, vocab: 8, batch: 8}\n", r"its time is measured"),
    ],
)
def test_what_contradicts_a_plan_is_told_at_its_place(text: str, told: str) -> None:
    with pytest.raises(JobFileError, match=told):
        read_job(text, filename="job.yaml")


def test_a_class_has_no_plan_to_search_and_a_job_with_more_splits_than_are_compared_is_refused() -> None:
    assert planned(SPLIT).plans == ()
    with pytest.raises(BadInput, match=r"65 splits between main; at most 64 are compared"):
        planned(SPLIT.replace("3}", "65}"))


def test_a_model_whose_numbers_do_not_divide_is_refused_at_admission() -> None:
    with pytest.raises(BadInput, match=r"roles\.main\.plan: model\.heads: hidden 256 does not divide by heads 3"):
        planned(FILE.replace("heads: 4", "heads: 3"))


def test_the_dry_run_tells_the_plan_of_each_size_and_the_text_of_the_job_keeps_its_question(tmp_path: Path) -> None:
    report = plan_job({"source": FILE, "filename": "job.yaml", "workdir": str(tmp_path)})
    [row] = report["roles"]
    sizes = [one["replicas"] for one in row["plans"]]
    assert sizes[0] == 1 and len(sizes) > 1
    assert row["plans"][-1]["why"].startswith(f"{2 * sizes[-1]} devices: ")
    spec = JobSpec.from_json(report["spec"])
    assert JobSpec.from_json(spec.to_json()).role("main").plans == spec.role("main").plans
    assert read_job(job_text(read_job(FILE, filename="a")), filename="b") == read_job(FILE, filename="a")
