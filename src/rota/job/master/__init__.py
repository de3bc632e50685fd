"""The master of a job: its loop over the event log, the executor of commands, the diagnosis of hangs."""
