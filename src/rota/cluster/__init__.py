"""Who gets which devices, when, and why not now: one pure cycle, live and in virtual time."""
