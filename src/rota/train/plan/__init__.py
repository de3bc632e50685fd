"""The plan of a parallel training run as a value: what it says, what it costs, how the best one is found."""
