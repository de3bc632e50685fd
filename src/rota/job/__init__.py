"""The life of one job: what users write, the processes that run it, and the master that starts and heals them."""
