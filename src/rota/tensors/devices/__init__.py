"""Tensors on devices: their drivers, and the client of a device's keeper (``rota.tensors.keeper``)."""
