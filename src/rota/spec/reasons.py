"""The closed list of reasons, and the state each ends in.

A reason explains a decision or an end. Its name is stable; the text may improve. ``INFO`` gives each reason its family,
a title, a sentence, who is at fault, and the final state if it can end a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rota.spec.states import JobState


class Reason(StrEnum):
    """Why something was decided or ended; families: waiting, moving, failure, failover, end, refusal."""

    # waiting, in the order in which they are tried (the first that binds is named)
    QUOTA_LIMIT = "QUOTA_LIMIT"
    USER_LIMIT = "USER_LIMIT"
    GUARANTEE_FULL_NO_BORROW = "GUARANTEE_FULL_NO_BORROW"
    TOO_LARGE = "TOO_LARGE"
    NO_FREE_DEVICES = "NO_FREE_DEVICES"
    FRAGMENTED = "FRAGMENTED"
    WRONG_TYPE = "WRONG_TYPE"
    DEVICE_MEMORY = "DEVICE_MEMORY"
    CPU_OR_MEMORY = "CPU_OR_MEMORY"
    TOPOLOGY = "TOPOLOGY"
    PINNED_BUSY = "PINNED_BUSY"
    BAD_CELLS = "BAD_CELLS"
    AWAITING_PREEMPTION = "AWAITING_PREEMPTION"
    RESERVED_FOR_OTHER = "RESERVED_FOR_OTHER"
    BEHIND_IN_ORDER = "BEHIND_IN_ORDER"
    NOT_BEFORE = "NOT_BEFORE"
    PAUSED = "PAUSED"
    QUEUE_CLOSED = "QUEUE_CLOSED"
    COOL_DOWN = "COOL_DOWN"
    NON_PREEMPTIBLE_OVER_QUOTA = "NON_PREEMPTIBLE_OVER_QUOTA"
    DEPENDENCY = "DEPENDENCY"
    ISOLATION = "ISOLATION"
    BACKOFF = "BACKOFF"
    ENGINE_STARTING = "ENGINE_STARTING"
    ENV_STARTING = "ENV_STARTING"
    INFEASIBLE_NOW = "INFEASIBLE_NOW"
    # moving
    PREEMPTED_RECLAIM = "PREEMPTED_RECLAIM"
    PREEMPTED_PRIORITY = "PREEMPTED_PRIORITY"
    MIGRATED_AFFINITY = "MIGRATED_AFFINITY"
    MIGRATED_DRAIN = "MIGRATED_DRAIN"
    RESIZED_AUTOSCALE = "RESIZED_AUTOSCALE"
    RESIZED_DEGRADED = "RESIZED_DEGRADED"
    RESIZED = "RESIZED"
    TIME_SLICE = "TIME_SLICE"
    SERVICE_DOWN = "SERVICE_DOWN"
    # failure
    EXIT_NONZERO = "EXIT_NONZERO"
    SIGNALLED = "SIGNALLED"
    SELF_ENDED = "SELF_ENDED"
    OOM_KILLED = "OOM_KILLED"
    GPU_OOM = "GPU_OOM"
    GPU_LOST = "GPU_LOST"
    GPU_ECC = "GPU_ECC"
    NODE_LOST = "NODE_LOST"
    HANG = "HANG"
    COLLECTIVE_TIMEOUT = "COLLECTIVE_TIMEOUT"
    COLLECTIVE_WRONG = "COLLECTIVE_WRONG"
    NO_PROGRESS = "NO_PROGRESS"
    START_TIMEOUT = "START_TIMEOUT"
    PORT_BUSY = "PORT_BUSY"
    ENV_SETUP_FAILED = "ENV_SETUP_FAILED"
    IMAGE_PULL_FAILED = "IMAGE_PULL_FAILED"
    IMPORT_ERROR = "IMPORT_ERROR"
    DATA_UNREACHABLE = "DATA_UNREACHABLE"
    DATA_ERROR = "DATA_ERROR"
    OUTPUT_FULL = "OUTPUT_FULL"
    CHECKPOINT_BAD = "CHECKPOINT_BAD"
    NAN_LOSS = "NAN_LOSS"
    TENSOR_LOST = "TENSOR_LOST"
    MASTER_LOST = "MASTER_LOST"
    ENGINE_LOST = "ENGINE_LOST"
    GANG_TIMEOUT = "GANG_TIMEOUT"
    STATE_LOST = "STATE_LOST"
    USER_ERROR = "USER_ERROR"
    # moves between levels of recovery
    BUDGET_PROCESS = "BUDGET_PROCESS"
    BUDGET_NODE = "BUDGET_NODE"
    NODE_SUSPECT = "NODE_SUSPECT"
    SCOPE_NARROW = "SCOPE_NARROW"
    NO_NODE = "NO_NODE"
    NODE_HEALTHY = "NODE_HEALTHY"
    # end
    COMPLETED = "COMPLETED"
    STOPPED_BY_USER = "STOPPED_BY_USER"
    STOPPED_BY_ADMIN = "STOPPED_BY_ADMIN"
    TIME_LIMIT = "TIME_LIMIT"
    IDLE = "IDLE"
    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"
    INTERNAL = "INTERNAL"
    # refusal
    INVALID = "INVALID"
    INFEASIBLE = "INFEASIBLE"
    UNKNOWN_QUEUE = "UNKNOWN_QUEUE"
    NOT_ALLOWED = "NOT_ALLOWED"
    CONFLICT = "CONFLICT"
    IDEMPOTENCY_CONFLICT = "IDEMPOTENCY_CONFLICT"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    SCHEMA_TOO_NEW = "SCHEMA_TOO_NEW"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"


FENCED_EXIT_STATUS, STUCK_EXIT_STATUS = 70, 71
ENDED_ITSELF = {
    FENCED_EXIT_STATUS: "its master was not heard for too long, and may have replaced it",
    STUCK_EXIT_STATUS: "an operation of an older epoch did not let go, so it could not take part in a recovery",
}
"""Exit statuses with which an instance makes room for another one, and why."""


@dataclass(frozen=True, slots=True)
class ReasonInfo:
    """What a reason means to people: family, fault (user, data, infra, policy, rota), one sentence, final state."""

    family: str
    fault: str
    text: str
    ends_in: JobState | None = None


def _rows(family: str, fault: str, ends_in: JobState | None, **texts: str) -> dict[Reason, ReasonInfo]:
    return {Reason(name): ReasonInfo(family, fault, text, ends_in) for name, text in texts.items()}


INFO: dict[Reason, ReasonInfo] = {
    **_rows(
        "waiting",
        "policy",
        None,
        QUOTA_LIMIT="The queue, or one above it, is at its limit.",
        USER_LIMIT="The user is at the limit of this queue.",
        GUARANTEE_FULL_NO_BORROW="The guarantee of the queue is used up and nothing may be borrowed.",
        TOO_LARGE="The request is larger than anything the cluster can free.",
        NO_FREE_DEVICES="Not enough devices are free for the whole gang.",
        FRAGMENTED="Enough devices are free, but not together where the gang needs them.",
        WRONG_TYPE="No node has the asked type of device.",
        DEVICE_MEMORY="No free device has the asked memory.",
        CPU_OR_MEMORY="Devices are free, but CPU cores or memory beside them are not.",
        TOPOLOGY="Free devices are not close enough, or not far enough apart, for what the roles ask.",
        PINNED_BUSY="The pinned cell is in use.",
        BAD_CELLS="Devices of this tenant are out of order.",
        AWAITING_PREEMPTION="Devices are being given back by preempted jobs.",
        RESERVED_FOR_OTHER="Free devices are reserved for a job ahead.",
        BEHIND_IN_ORDER="A job ahead in the order of the queue must start first.",
        NOT_BEFORE="The job asked not to begin before a later time.",
        PAUSED="The job is paused; rota resume JOB puts it back into the queue.",
        QUEUE_CLOSED="The queue is closed for new starts.",
        COOL_DOWN="A cool-down after a preemption has not passed.",
        NON_PREEMPTIBLE_OVER_QUOTA="Work that may not be preempted must fit into the guarantee.",
        DEPENDENCY="A job that this one comes after has not ended.",
        ISOLATION="No node offers the isolation that the queue demands.",
        BACKOFF="The job waits before its next attempt.",
        ENGINE_STARTING="The engine is starting.",
        ENV_STARTING="The environment of the job is being made.",
        INFEASIBLE_NOW="Nodes left the cluster; what remains can never hold the request.",
    ),
    **_rows(
        "moving",
        "policy",
        None,
        PREEMPTED_RECLAIM="A queue took back what it had lent.",
        PREEMPTED_PRIORITY="A job of higher priority needed the devices.",
        MIGRATED_AFFINITY="Moved to devices that are closer together.",
        MIGRATED_DRAIN="Moved off a node that is being drained.",
        RESIZED_AUTOSCALE="A role changed size by its autoscaling rule.",
        RESIZED_DEGRADED="A role goes on with fewer instances until a replacement is found.",
        RESIZED="A role changed its size: it was asked to, or devices for more of it became free.",
        TIME_SLICE="Another job has its turn on the devices.",
        SERVICE_DOWN="The service was taken down; the job continues from its last commit when it runs again.",
    ),
    **_rows(
        "failure",
        "user",
        JobState.FAILED,
        EXIT_NONZERO="A process ended with a non-zero exit status.",
        GPU_OOM="A device ran out of memory.",
        IMPORT_ERROR="The workload could not be imported.",
        ENV_SETUP_FAILED="The environment could not be made.",
        USER_ERROR="The workload raised an exception.",
        NAN_LOSS="The reported loss is not finite.",
        NO_PROGRESS="No progress was marked within the limit.",
        HANG="Processes wait for each other without progress.",
        COLLECTIVE_TIMEOUT="A collective did not complete in time.",
        OOM_KILLED="A process used more memory than it may.",
    ),
    **_rows(
        "failure",
        "data",
        JobState.FAILED,
        DATA_UNREACHABLE="The data could not be reached.",
        DATA_ERROR="Items of the data failed on different instances.",
        CHECKPOINT_BAD="No complete checkpoint could be read.",
    ),
    **_rows(
        "failure",
        "infra",
        JobState.FAILED,
        SIGNALLED="A process was ended by a signal.",
        GPU_LOST="A device disappeared.",
        GPU_ECC="A device reported uncorrectable memory errors.",
        NODE_LOST="A node stopped answering.",
        NODE_SUSPECT="Several instances of one node died together, or a full check found it unfit.",
        COLLECTIVE_WRONG="A sum over the members of a mesh is wrong; which node spoils it is not known.",
        SELF_ENDED="A process ended itself so that another takes its place: see the exit statuses 70 and 71.",
        START_TIMEOUT="Nobody came further in a start for five minutes, or it took an hour.",
        PORT_BUSY="A port was taken.",
        IMAGE_PULL_FAILED="The image could not be fetched.",
        OUTPUT_FULL="The output directory is full or gone.",
        TENSOR_LOST="A tensor that was needed is gone.",
        MASTER_LOST="The master of the job is gone and could not be started again.",
        ENGINE_LOST="The engine was lost; the job goes on from its last commit.",
        GANG_TIMEOUT="The gang was not complete within the limit.",
        STATE_LOST="The state of a role survives only in an older checkpoint.",
    ),
    **_rows(
        "failover",
        "policy",
        None,
        BUDGET_PROCESS="The limit of process restarts in the window is used up.",
        BUDGET_NODE="The limit of node replacements in the window is used up.",
        SCOPE_NARROW="Only a part of the graph was touched.",
        NO_NODE="No other node is to be had.",
        NODE_HEALTHY="The node passed its check; only processes died.",
    ),
    **_rows("end", "user", JobState.SUCCEEDED, COMPLETED="Every role that had to end returned."),
    **_rows(
        "end",
        "user",
        JobState.CANCELLED,
        STOPPED_BY_USER="Stopped by its user.",
        STOPPED_BY_ADMIN="Stopped by an admin.",
    ),
    **_rows(
        "end",
        "policy",
        JobState.FAILED,
        TIME_LIMIT="The time limit was reached.",
        IDLE="Its devices were idle for too long.",
        RETRIES_EXHAUSTED="Every allowed retry was used.",
    ),
    **_rows("end", "rota", JobState.FAILED, INTERNAL="A bug in Rota; the log has the story."),
    **_rows("refusal", "user", JobState.FAILED, INVALID="The request is not valid."),
    **_rows(
        "refusal",
        "user",
        None,
        INFEASIBLE="No set of nodes could ever hold the request.",
        UNKNOWN_QUEUE="There is no such queue.",
        NOT_ALLOWED="The token may not do this.",
        CONFLICT="The object is in another state.",
        IDEMPOTENCY_CONFLICT="The same key came with another body.",
        VERSION_MISMATCH="Client and service have different versions.",
        SCHEMA_TOO_NEW="The database was written by a newer version.",
        LIMIT_EXCEEDED="A limit is reached.",
    ),
}


def final_state(reason: Reason) -> JobState:
    """The terminal state a job reaches when it ends for this reason. Raises KeyError for a reason that ends no job."""
    state = INFO[reason].ends_in
    if state is None:
        raise KeyError(f"{reason} does not end a job")
    return state
