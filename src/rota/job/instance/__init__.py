"""An instance of a role: its process, runners of each kind of workload, operations, streams, handles."""
