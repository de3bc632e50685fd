"""The job file: text to JobSpec and back, or every mistake in it at its place."""
