"""The master of a job and what it uses: executor, diagnosis, snapshots, rendezvous."""
