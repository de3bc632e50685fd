"""One file a version of the schema, oldest first."""
