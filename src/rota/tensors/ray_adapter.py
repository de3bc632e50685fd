"""Adapter for Ray objects whose tensors travel through the tensor store: mapped, not copied.

After ``register()`` an actor with ``enable_tensor_transport=True`` returns tensors by
``@ray.method(tensor_transport="rota")``, and anybody stores them by ``ray.put(tensor, _tensor_transport="rota")``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.runtime.ray import tensors as ray_tensors
from rota.tensors.api.store import Plane, connect
from rota.tensors.arrays import load_torch
from rota.tensors.core import Tensor


class RayTransport(ray_tensors.PlaneTransport):
    """One copy into shared memory where an object is made, none where it is read. Its name goes with its maker."""

    def publish(self, obj_id: str, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """A group of the object's tensors, dropped when this process dies."""
        plane, name = connect(), f"ray/{obj_id}"
        plane.publish_group(name, {str(index): tensor for index, tensor in enumerate(tensors)}, orphan="drop")
        return str(plane.home), plane.namespace, name

    def fetch(self, where: tuple[str, ...]) -> list[Tensor]:
        """Views of them; each holds its lease. Raises NotFound when the maker died."""
        home, namespace, name = where
        found = connect(home=home, namespace=namespace).get_group(name)
        return [found[str(index)] for index in range(len(found))]

    def drop(self, where: tuple[str, ...]) -> None:
        """The name goes at once, the bytes with the last view of any process."""
        home, namespace, name = where
        connect(home=home, namespace=namespace).delete(name, missing_ok=True)


def register() -> Plane:
    """Make ``_tensor_transport="rota"`` known to the actors this process creates from now on. Raises MissingExtra."""
    ray_tensors.register(RayTransport, load_torch().Tensor)
    return connect()
