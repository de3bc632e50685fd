"""The app and the wiring: REST, page, command line, Python client, settings; the one place where parts meet."""
