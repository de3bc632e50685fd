"""Models for the examples and tests: readable, small, with the parts that a plan speaks about."""
