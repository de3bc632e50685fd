"""Launcher protocol: reserve, start, find, call, stop; the values that cross it.

Two launchers exist: ``ray/launcher.py`` and that of ``rota.testing``; both pass the same conformance tests. Names are
deterministic, so that whoever comes after a crash finds what exists: a reservation is ``<job>/<gang>/<epoch>``, an
instance ``<job>/<role>/<rank>/<epoch>``, the master of a job ``<job>/master``; all inside the namespace
``rota/<install>``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rota.spec.gang import BundleGrant
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.resources import Limits, Res

_NO_NODE = NodeId("")


def reservation_name(job: JobId, gang: GangId, epoch: Epoch) -> str:
    """Name of a reservation."""
    return f"{job}/{gang}/{epoch}"


def instance_name(job: JobId, instance: InstanceId, epoch: Epoch) -> str:
    """Name of the process of an instance; ``epoch`` is the one it was started under."""
    return f"{job}/{instance.role}/{instance.rank}/{epoch}"


def master_name(job: JobId) -> str:
    """Name of the master of a job."""
    return f"{job}/master"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Resources held in the engine for one gang under one epoch."""

    job: JobId
    gang: GangId
    epoch: Epoch

    @property
    def name(self) -> str:
        return reservation_name(self.job, self.gang, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """A process to start. ``target`` is ``module:Class``, made as ``Class(**args)`` inside the new process.

    ``args`` are JSON-able. ``env`` is set before the target is imported (not before the interpreter starts, so
    ``PYTHONHASHSEED`` and the like act on child processes only). ``bundle`` is an index into the reservation.
    ``devices`` are the exact device indices the process may see. ``node`` is the scheduler's node of the bundle; it
    comes back in the Handle. With ``log_path`` everything the process and its children write goes there, one line each
    ``<ISO time> <attempt>/<epoch> <stdout|stderr> <text>``; the attempt is ``ROTA_ATTEMPT`` of ``env``.
    """

    job: JobId
    instance: InstanceId
    epoch: Epoch
    target: str
    args: Mapping[str, object] = field(default_factory=dict[str, object])
    env: Mapping[str, str] = field(default_factory=dict)
    reservation: str
    bundle: int
    node: NodeId = _NO_NODE
    devices: tuple[int, ...] = ()
    res: Res
    limits: Limits = field(default_factory=Limits)
    packages: tuple[str, ...] = ()
    workdir: str = ""
    imports: bool = True
    """Whether modules of the workdir can be imported in this process."""
    log_path: str = ""

    @property
    def name(self) -> str:
        return instance_name(self.job, self.instance, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A started process: its name, where it is, and its pid with start time (a pid alone may be reused).

    ``start_time`` is in seconds since boot (``process.start_time_of``). A handle made from a name alone (pid 0) is
    enough to call and to stop.
    """

    name: str
    job: JobId
    instance: InstanceId
    epoch: Epoch
    node: NodeId
    pid: int
    start_time: float = 0.0
    address: str = ""
    """Where it is called from other machines, ``host:port``; empty when none can."""
    breach: str = ""
    """File on its machine that says which limit it exceeded, once it was ended for that; empty without limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call on a process, ``method(*head, *args, **kwargs)``; ``control`` calls never queue behind user code.

    ``head`` is plain (texts, numbers, lists and dicts of them): it travels with the name of the method, almost free.
    """

    method: str
    head: tuple[object, ...] = ()
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    timeout_s: float | None = None
    control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Processes and reservations of a job in the engine, and the hosts of the engine; no hosts when it does not say."""

    reservations: tuple[Reservation, ...] = ()
    instances: tuple[Handle, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDied:
    """A started process is gone. ``exit_code`` and ``signal`` when known, ``out_of_memory`` if that ended it.

    ``exceeded`` says which limit of its role it was ended for, with both figures; empty when it was for none.
    """

    name: str
    job: JobId
    instance: InstanceId
    epoch: Epoch
    text: str = ""
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    exceeded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDied:
    """The engine gave up on a node."""

    node: NodeId
    text: str = ""


RuntimeEvent = ProcessDied | NodeDied


class ReserveFailed(Exception):
    """The engine did not grant a reservation within the limit; the message says why."""


class ProcessGone(Exception):
    """The process of a handle does not exist any more, so the call had no effect or an unknown one (``started``).

    ``node_died``: its node went with it. ``unsure``: only the connection broke; the process may live, and the same call
    may be sent again to one that knows it by its number.
    """

    def __init__(self, message: str, *, started: bool = True, node_died: bool = False, unsure: bool = False) -> None:
        super().__init__(message)
        self.started, self.node_died, self.unsure = started, node_died, unsure


class CallTimeout(Exception):
    """No answer within ``timeout_s``; the process may still be at it."""


class NotPicklable(Exception):
    """The arguments of a call, or its ``answer``, cannot be pickled; the message is what pickle said of it."""

    def __init__(self, message: str, *, answer: bool) -> None:
        super().__init__(message)
        self.answer = answer


class DeathsLost(Exception):
    """More deaths waited for the consumer of ``events`` than are kept: it has to look who is alive."""


class RemoteError(Exception):
    """A method raised an exception whose class the caller may not have; ``type_name`` is its full name.

    Exceptions of Rota and of Python itself arrive as they are. ``remote_traceback`` gives the traceback of either.
    """

    def __init__(self, message: str, *, type_name: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_remote, (str(self), self.type_name, self.trace))


def _rebuild_remote(message: str, type_name: str, trace: str) -> RemoteError:
    return RemoteError(message, type_name=type_name, trace=trace)


def remote_traceback(error: BaseException) -> str:
    """The traceback inside the called process of an exception raised by ``call`` or ``start``; empty if it has none."""
    return getattr(error, "trace", "") or "".join(getattr(error, "__notes__", ()))


class Launcher(Protocol):
    """Starts and finds processes. All effects are idempotent by name."""

    async def reserve(
        self, reservation: Reservation, bundles: Sequence[BundleGrant], *, timeout_s: float
    ) -> Reservation:
        """Reserve all bundles or none; returns the existing one of that name. Raises ReserveFailed."""
        ...

    async def start(self, spec: InstanceSpec, *, timeout_s: float) -> Handle:
        """Start the process; one of the same name that is alive is returned.

        Raises ProcessGone, CallTimeout, or what the import or the constructor of the target raised (then no process is
        left, and ``remote_traceback`` of the error is that of the constructor).
        """
        ...

    async def find(self, job: JobId) -> Found:
        """Everything of the job that is alive."""
        ...

    async def call(self, to: Handle, call: Call) -> Any:
        """Call a method and wait. Raises ProcessGone, CallTimeout, NotPicklable, or what the method raised (see
        RemoteError).

        A call on a master waits through its restart, up to ``timeout_s``, and may then run twice: methods of masters
        are idempotent. A call on an instance is sent once.
        """
        ...

    def hang_up(self, handle: Handle) -> None:
        """Wait no more for a process that its master has given up: open calls to it raise ProcessGone. Any thread."""
        ...

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Ask the process to end (its ``stop()`` control method), then force; returns when the process is gone."""
        ...

    async def release(self, reservation: Reservation) -> None:
        """Release a reservation; a no-op if it does not exist."""
        ...

    def events(self, job: JobId) -> AsyncIterator[RuntimeEvent]:
        """Deaths of processes of the job that were started or found through this launcher, as they happen.

        Stopped ones are reported too. One consumer a job; deaths before it came are kept for it. Raises DeathsLost when
        more waited than are kept: then ``find`` gives what is alive.
        """
        ...


def handle_of(
    name: str, *, pid: int = 0, start_time: float = 0.0, node: str = "", address: str = "", breach: str = ""
) -> Handle:
    """The handle of an instance or master from its name. Raises ValueError for any other name."""
    job, _, rest = name.partition("/")
    if rest == "master":
        instance, epoch = InstanceId(RoleName("master"), 0), 0
    else:
        identity, _, number = rest.rpartition("/")
        instance, epoch = InstanceId.parse(identity), int(number)
    return Handle(
        name=name,
        job=JobId(job),
        instance=instance,
        epoch=Epoch(epoch),
        node=NodeId(node),
        pid=pid,
        start_time=start_time,
        address=address,
        breach=breach,
    )


def reservation_of(name: str) -> Reservation:
    """The reservation from its name. Raises ValueError for any other name."""
    from_job, _, epoch = name.rpartition("/")
    job, _, gang = from_job.partition("/")
    return Reservation(job=JobId(job), gang=GangId(gang), epoch=Epoch(int(epoch)))
