"""The registry server of shared tensors, and a client of its protocol."""
