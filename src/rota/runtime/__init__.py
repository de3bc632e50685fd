"""The only package that touches the world: time, disk, processes, SQL, Redis, Ray; protocols have in-memory twins."""
