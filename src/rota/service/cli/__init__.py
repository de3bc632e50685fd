"""The command line: argument parsing, verbs, output."""
