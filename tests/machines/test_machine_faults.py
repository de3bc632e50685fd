"""A job over three machines of which one after the other is cut off or loses its power: its commits stay.

What had reached another machine or a disk is never lost.

The tests follow each other: the job that one has disturbed is the job of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tests.machines.bed import Machine, bed
from tests.machines.counting import CODE, Watched
from tests.machines.site import Site, long, site
from tests.real.jobs import deep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CUT_S = 30.0
CPUS = 2
JOB = """
name: faults
env: {STEP_S: "0.3"}
roles:
  counter: {workload: "counting:Counter", resources: {cpus: 2}, fail: {state: peer, limit: 200/10m}}
  echo: {workload: "counting:Echo", resources: {cpus: 1}, fail: {limit: 200/10m}}
  loop:
    workload: "counting:counts"
    resources: {cpus: 1}
    collocate: [{role: echo, level: node}]
    fail: {limit: 200/10m}
"""


@pytest.fixture(scope="module")
def over_three() -> Iterator[Site]:
    with bed(3, subnet=82) as machines, site(machines, joined=True, cpus=[CPUS] * 3) as made:
        made.put("counting.py", CODE)
        yield made


@pytest.fixture(scope="module")
def job(over_three: Site) -> Watched:
    """Its counter and its loop are on two machines that are not that of the service."""
    over_three.rota("nodes", "cordon", over_three.head.name, "--yes")
    found = Watched(over_three, over_three.submit(JOB))
    found.goes_on()
    return found


def machine_of(job: Watched, instance: str) -> Machine:
    places = job.places()
    return next(one for one in job.site.machines if instance in places[one.name])


def moves(job: Watched, instance: str, lost: Machine) -> None:
    """Wait until it runs again, with that instance on another machine."""

    def elsewhere() -> bool:
        places = job.places()
        return any(instance in found for name, found in places.items() if name != lost.name)

    job.wait(lambda: elsewhere() and job.state == "RUNNING", "it runs elsewhere")


def recovers(job: Watched) -> None:
    """It continues, with all machines, and runs where the service says and nowhere else."""
    job.goes_on()
    job.site.healthy()
    job.goes_on()
    job.site.until(lambda: [job.processes() == job.places(), job.state], [True, "RUNNING"])
    job.check_faults()


def cut(job: Watched, instance: str, machine: Machine) -> None:
    """Half a minute without a cable; the job commits meanwhile."""
    before, began = job.commits(), time.monotonic()
    machine.link(up=False)
    moves(job, instance, machine)
    within_s = time.monotonic() - began
    job.wait(lambda: job.commits() > before + 3, "it commits without that machine")
    print(f"cut: {instance} runs elsewhere after {within_s:.1f} s, commits after {time.monotonic() - began:.1f} s")
    time.sleep(max(0.0, began + CUT_S - time.monotonic()))
    machine.link(up=True)


def power(job: Watched, instance: str, machine: Machine) -> None:
    """All processes and the memory of a machine at once; it joins again."""
    machine.kill()
    moves(job, instance, machine)
    job.goes_on()
    machine.start()
    job.site.join(machine, CPUS)


def loses(job: Watched, instance: str, fault: Callable[[Watched, str, Machine], None]) -> None:
    """A fault of the machine of an instance. That of the service takes part where the others have no room for it."""
    head, lost = job.site.head, machine_of(job, instance)
    assert lost is not head
    job.site.rota("nodes", "cordon" if job.places()[head.name] else "uncordon", head.name, "--yes")
    fault(job, instance, lost)
    job.site.rota("nodes", "uncordon", head.name, "--yes")
    recovers(job)


@long
@pytest.mark.parametrize(("fault", "instance"), [(cut, "counter/0"), (power, "loop/0"), (cut, "loop/0")])
def test_a_machine_that_is_cut_off_or_loses_its_power(
    job: Watched, fault: Callable[[Watched, str, Machine], None], instance: str
) -> None:
    before = job.commits()
    loses(job, instance, fault)
    assert (job.state, job.commits() > before) == ("RUNNING", True), job.events()[-20:]


@long
def test_the_machine_of_the_service_loses_its_power_and_the_job_continues_after_rota_up(job: Watched) -> None:
    """Masters, log and engine were there. Its disk survives, and the others have the state of commits."""
    over, before = job.site, job.commits()
    over.head.kill()
    over.head.start()
    over.up()
    recovers(job)
    assert job.commits() > before


def leave_the_head(job: Watched) -> None:
    """Move the job off the machine of the service."""
    head = job.site.head.name
    job.site.rota("nodes", "drain", head, "--notice", "3s", "--yes")
    job.wait(lambda: not job.places()[head] and job.state == "RUNNING", "it has left")
    job.site.rota("nodes", "undrain", head)


@deep
def test_power_cuts_in_a_row_cost_no_commit_that_another_machine_had(job: Watched, stops: int) -> None:
    """``--stops`` of them, in turn of the machine of the state and of the loop."""
    for n in range(stops):
        leave_the_head(job)
        before = job.commits()
        loses(job, ("counter/0", "loop/0")[n % 2], power)
        assert job.commits() > before, job.events()[-20:]
        back = [one for one in job.events() if one["kind"] == "RolledBack"]
        again = sum(one["from_commit"] - one["to_commit"] for one in back)
        print(
            f"{n + 1} power cuts: {len(back)} rollbacks, {again} commits made again, now at {job.commits()}", flush=True
        )


@long
def test_of_a_job_that_is_stopped_nothing_is_left_on_any_machine(job: Watched) -> None:
    over = job.site
    over.rota("stop", job.id, "--yes")
    over.ended(job.id)
    job.check_faults()
    over.until(lambda: [*job.processes().values(), *over.tensors().values()], [[]] * 6)
    assert over.json("show", job.id)["state"] == "CANCELLED"


@long
def test_a_job_that_ends_while_a_machine_is_cut_off_leaves_no_tensors_there(over_three: Site) -> None:
    over = over_three
    over.rota("nodes", "cordon", over.head.name, "--yes")
    job = Watched(over, over.submit(JOB.replace("name: faults", "name: ends")))
    job.goes_on()
    lost = machine_of(job, "counter/0")
    assert over.tensors()[lost.name]
    lost.link(up=False)
    over.rota("stop", job.id, "--yes", "--grace", "2s")
    assert over.ended(job.id)["state"] == "CANCELLED"
    lost.link(up=True)
    over.rota("nodes", "uncordon", over.head.name, "--yes")
    over.healthy()
    over.until(over.tensors, {machine.name: [] for machine in over.machines})


@long
def test_of_an_installation_nothing_is_left_on_machines_that_leave_and_on_that_of_the_service(over_three: Site) -> None:
    over = over_three
    for machine in over.machines[1:]:
        over.leave(machine)
        assert machine.processes() == {} and machine.left_in_memory() == []
    over.rota("down", "--force")
    assert over.head.processes() == {} and over.head.left_in_memory() == []
