"""A file a family of verbs; each asks the client, offline.py or local.py, and shows the answer."""
