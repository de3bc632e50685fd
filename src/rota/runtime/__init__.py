"""The only package that touches the world: time, chance, disk, processes, SQL, Redis, Ray; each protocol has an in-memory twin."""
