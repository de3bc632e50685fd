"""Pure rules of the tensor store: what a name may be, how memory is divided."""
