"""A file a resource; every handler reads the views or appends an event, and keeps nothing."""
