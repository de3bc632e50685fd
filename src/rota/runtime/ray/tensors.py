"""Ray's hooks for tensors that travel outside its object store: what a transport of Ray 2.60 must answer.

Ray counts the references of an object and notifies the process that made it when the last is gone; the transport frees
the bytes then. A subclass says where bytes go: ``publish``, ``fetch``, ``drop``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import ray
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

from rota.spec.errors import BadInput, NotReachable

BACKEND = "ROTA"


@dataclass
class PublishedTensors(TensorTransportMetadata):
    """What travels through Ray instead of the tensors: where they are published, on which node."""

    where: tuple[str, ...] = ()
    node: str = ""


if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from torch import Tensor


class PlaneTransport(TensorTransportManager):
    """A one-sided transport: the receiver maps what the sender published, so that nothing is ever half sent."""

    def publish(self, obj_id: str, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Publish the tensors of an object; where they are."""
        raise NotImplementedError

    def fetch(self, where: tuple[str, ...]) -> list[Tensor]:
        """The tensors of an object."""
        raise NotImplementedError

    def drop(self, where: tuple[str, ...]) -> None:
        """Free the tensors of an object without references."""
        raise NotImplementedError

    @property
    def tensor_transport_backend(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  # as Ray's own do
        """The name by which ``_tensor_transport=`` asks for it."""
        return BACKEND

    @staticmethod
    def is_one_sided() -> bool:
        """The sender takes no part in a transfer."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """A failed transfer blocks no actor, so none has to be killed."""
        return True

    def actor_has_tensor_transport(self, actor: ActorHandle) -> bool:
        """Ray registers it on every actor before its first use."""
        del actor
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Tensor]) -> PublishedTensors:
        """Called where an object was made: publish it. Raises BadInput for tensors of different devices."""
        kinds = {tensor.device.type for tensor in rdt_object}
        if len(kinds) > 1:
            raise BadInput(f"the tensors of one object are on {' and '.join(sorted(kinds))}; put them apart")
        return PublishedTensors(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=next(iter(kinds), None),
            where=self.publish(obj_id, rdt_object),
            node=_node(),
        )

    def get_communicator_metadata(
        self, src_actor: ActorHandle, dst_actor: ActorHandle, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Sender and receiver need to know nothing of each other."""
        del src_actor, dst_actor, backend
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """The tensors, mapped; copied when the caller gave buffers. Raises NotReachable on another node."""
        del communicator_metadata
        found = cast("PublishedTensors", tensor_transport_metadata)
        if found.node != _node():
            raise NotReachable(f"object {obj_id} is published on node {found.node}, this is node {_node()}")
        tensors = self.fetch(found.where)
        if not target_buffers:
            return tensors
        return [target.copy_(tensor) for target, tensor in zip(target_buffers, tensors, strict=True)]

    def send_multiple_tensors(
        self,
        tensors: list[Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Never called for a one-sided transport."""
        raise NotImplementedError("the receiver maps the tensors")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Tensor]
    ) -> None:
        """Called where the object was made when the last reference is gone."""
        del obj_id, tensors
        self.drop(cast("PublishedTensors", tensor_transport_meta).where)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Nothing is under way that could be stopped."""


def register(transport: type[PlaneTransport], data_type: type) -> None:
    """Make ``_tensor_transport="rota"`` known to the actors this process creates from now on; again is harmless."""
    try:
        register_tensor_transport(BACKEND, ["cpu", "cuda"], transport, data_type)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def _node() -> str:
    return ray.get_runtime_context().get_node_id()
