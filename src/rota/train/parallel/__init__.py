"""The axes of a plan on a model: its parts, data, tensor, context and expert parallel, and number formats."""
