"""Tensors on devices: their drivers, the keeper of a device's memory, its clients."""
