"""Every answer of the REST API and every document of the command line, as files that a change is compared with."""
