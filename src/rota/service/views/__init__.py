"""Answers from events: every document of the API is computed from the log, here and nowhere else."""
