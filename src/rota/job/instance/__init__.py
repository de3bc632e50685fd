"""An instance of a role: its process, its runner, its streams, weights and process group."""
