"""The closed list of reasons, and the state each ends in.

A reason explains a decision or an end. Its name is stable; the text may improve. ``INFO`` gives each reason its family,
a title, a sentence, who is at fault, and the final state if it can end a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from functools import partial
from typing import cast

from rota.spec.states import JobState

FENCED_EXIT_STATUS, STUCK_EXIT_STATUS = 70, 71
ENDED_ITSELF = {
    FENCED_EXIT_STATUS: "its master was not heard for too long, and may have replaced it",
    STUCK_EXIT_STATUS: "an operation of an older epoch did not return, so it could not take part in a recovery",
}
"""Exit statuses with which an instance makes room for another one, and why."""


@dataclass(frozen=True, slots=True)
class ReasonInfo:
    """What a reason means to people: family, fault (user, data, infra, policy, rota), one sentence, final state."""

    family: str
    fault: str
    text: str
    ends_in: JobState | None = None


def _info(family: str, fault: str, text: str, ends_in: JobState | None = None) -> tuple[str, ReasonInfo]:
    name = cast("str", auto())  # ``_generate_next_value_`` makes the name of it
    return name, ReasonInfo(family, fault, text, ends_in)


_waits = partial(_info, "waiting", "policy")
_moves = partial(_info, "moving", "policy")
_widens = partial(_info, "failover", "policy")
_refuses = partial(_info, "refusal", "user")


def _fails(fault: str, text: str) -> tuple[str, ReasonInfo]:
    return _info("failure", fault, text, JobState.FAILED)


class Reason(StrEnum):
    """Why something was decided or ended; families: waiting, moving, failure, failover, end, refusal.

    Those of waiting stand in the order in which they are tried: the first that binds is named.
    """

    info: ReasonInfo

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[str]) -> str:
        del start, count, last_values
        return name

    def __new__(cls, name: str, info: ReasonInfo) -> Reason:
        reason = str.__new__(cls, name)
        reason._value_, reason.info = name, info
        return reason

    QUOTA_LIMIT = _waits("The queue, or one above it, is at its limit.")
    USER_LIMIT = _waits("The user is at the limit of this queue.")
    GUARANTEE_FULL_NO_BORROW = _waits("The guarantee of the queue is used up and nothing may be borrowed.")
    TOO_LARGE = _waits("The request is larger than anything the cluster can free.")
    NO_FREE_DEVICES = _waits("Not enough devices are free for the whole gang.")
    FRAGMENTED = _waits("Enough devices are free, but not together where the gang needs them.")
    WRONG_TYPE = _waits("No node has the asked type of device.")
    CPU_OR_MEMORY = _waits("Devices are free, but CPU cores or memory beside them are not.")
    TOPOLOGY = _waits("Free devices are not close enough, or not far enough apart, for what the roles ask.")
    NODES_DRAINED = _waits("Nodes that it could use are being drained or are cordoned: they take no new work.")
    BAD_CELLS = _waits("Devices of this tenant are out of order.")
    AWAITING_PREEMPTION = _waits("Devices are being given back by jobs that are stopping.")
    AWAITING_RELEASE = _waits("Devices are being given back by jobs that end or are paused.")
    RESERVED_FOR_OTHER = _waits("Free devices are reserved for a job ahead.")
    BEHIND_IN_ORDER = _waits("A job ahead in the order of the queue must start first.")
    NOT_BEFORE = _waits("The job asked not to begin before a later time.")
    DEPENDENCY = _waits("The job starts after other jobs, which have not ended.")
    PAUSED = _waits("The job is paused; rota resume JOB puts it back into the queue.")
    QUEUE_CLOSED = _waits("The queue, or one above it, is stopped or closed: it starts none of its jobs.")
    COOL_DOWN = _waits("A cool-down after a preemption has not passed.")
    NON_PREEMPTIBLE_OVER_QUOTA = _waits("Work that may not be preempted must fit into the guarantee.")
    ENGINE_STARTING = _waits("The engine is starting.")
    NO_USABLE_NODE = _waits("No machine can be used; the text names each with what it lacks.")
    INFEASIBLE_NOW = _waits("Nodes left the cluster; what remains can never hold the request.")
    PREEMPTED_RECLAIM = _moves("A queue took back what it had lent.")
    PREEMPTED_PRIORITY = _moves("A job of higher priority needed the devices.")
    MIGRATED_AFFINITY = _moves("Moved to devices that are closer together.")
    MIGRATED_DRAIN = _moves("Moved off a node that is being drained.")
    RESIZED_DEGRADED = _moves("A role continues with fewer instances until a replacement is found.")
    RESIZED = _moves("A role changed its size: it was asked to, or devices for more of it became free.")
    TIME_SLICE = _moves("Another job has its turn on the devices.")
    NODE_REMOVED = _moves("Its node was removed from the installation; the job continues on the remaining nodes.")
    SERVICE_DOWN = _moves("The service was taken down; the job continues from its last commit when it runs again.")
    EXIT_NONZERO = _fails("user", "A process ended with a non-zero exit status.")
    SIGNALLED = _fails("infra", "A process was ended by a signal.")
    SELF_ENDED = _fails("infra", "A process ended itself so that another can replace it; see exit statuses 70 and 71.")
    OOM_KILLED = _fails("user", "A process used more memory than it may.")
    OVER_LIMIT = _fails("user", "An instance used more processes, open files or disk than it may.")
    GPU_LOST = _fails("infra", "A device disappeared.")
    GPU_ECC = _fails("infra", "A device reported uncorrectable memory errors.")
    NODE_LOST = _fails("infra", "A node stopped answering.")
    HANG = _fails("user", "Processes wait for each other without progress.")
    COLLECTIVE_TIMEOUT = _fails("user", "A collective did not complete in time.")
    COLLECTIVE_WRONG = _fails("infra", "A sum over the members of a mesh is wrong; the faulty node is unknown.")
    NO_PROGRESS = _fails("user", "No progress was marked within the limit.")
    START_TIMEOUT = _fails("infra", "Startup made no progress for 5 minutes or exceeded 1 hour.")
    ENV_SETUP_FAILED = _fails("user", "The environment could not be made.")
    IMAGE_PULL_FAILED = _fails("user", "The image could not be pulled or unpacked.")
    IMPORT_ERROR = _fails("user", "The workload could not be imported.")
    DATA_UNREACHABLE = _fails("data", "The data could not be reached.")
    OUTPUT_UNREACHABLE = _fails("data", "The URL of the output cannot be written to.")
    DATA_ERROR = _fails("data", "Items of the data failed on different instances.")
    OUTPUT_FULL = _fails("infra", "The output directory is full or gone.")
    NAN_LOSS = _fails("user", "The reported loss is not finite.")
    TENSOR_LOST = _fails("infra", "A tensor that was needed is gone.")
    ENGINE_LOST = _fails(
        "infra", "The engine was lost, with all processes of the job or with the devices reserved for them."
    )
    GANG_TIMEOUT = _fails("infra", "The gang was not complete within the limit.")
    STATE_LOST = _fails("infra", "The state of a role survives only in an older checkpoint.")
    USER_ERROR = _fails("user", "The workload raised an exception.")
    BUDGET_PROCESS = _widens("The limit of process restarts in the window is used up.")
    BUDGET_NODE = _widens("The limit of node replacements in the window is used up.")
    SAME_ERROR = _widens("The same error came each time with no commit between; another try would fail as well.")
    NODE_SUSPECT = _fails("infra", "Several instances of one node died together, or a full check found it unfit.")
    SCOPE_NARROW = _widens("Only a part of the graph was lost; only that part is recovered.")
    NO_NODE = _widens("No other node is available.")
    NODE_HEALTHY = _widens("The node passed its check; only processes died.")
    COMPLETED = _info("end", "user", "All roles finished.", JobState.SUCCEEDED)
    STOPPED_BY_USER = _info("end", "user", "Stopped by its user.", JobState.CANCELLED)
    TIME_LIMIT = _info("end", "policy", "The time limit was reached.", JobState.FAILED)
    IDLE = _info("end", "policy", "Its ports were unused, and it did no work, for its idle limit.", JobState.CANCELLED)
    DEPENDENCY_FAILED = _info("end", "user", "A job that had to succeed before this one did not.", JobState.FAILED)
    INTERNAL = _info("end", "rota", "Internal error in Rota; see the service log.", JobState.FAILED)
    INVALID = _info("refusal", "user", "The request is not valid.", JobState.FAILED)
    INFEASIBLE = _refuses("No set of nodes could ever hold the request.")
    UNKNOWN_QUEUE = _refuses("The queue does not exist.")
    NOT_ALLOWED = _refuses("The token may not do this.")
    CONFLICT = _refuses("The object is in another state.")
    IDEMPOTENCY_CONFLICT = _refuses("The same key came with another body.")
    VERSION_MISMATCH = _refuses("The object was modified since it was read.")
    SCHEMA_TOO_NEW = _refuses("The database was written by a newer version.")
    LIMIT_EXCEEDED = _refuses("A limit is reached.")


INFO: dict[Reason, ReasonInfo] = {reason: reason.info for reason in Reason}


def final_state(reason: Reason) -> JobState:
    """The terminal state a job reaches when it ends for this reason. Raises KeyError for a reason that ends no job."""
    state = INFO[reason].ends_in
    if state is None:
        raise KeyError(f"{reason} does not end a job")
    return state
