"""Ray: the engine and its watcher, the gateway of the service, launcher and host of processes."""
