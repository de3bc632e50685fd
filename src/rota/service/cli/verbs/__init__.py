"""A file a family of verbs; each asks the client, or offline.py, and shows the answer."""
