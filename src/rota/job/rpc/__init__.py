"""Calls between the processes of a job: client, payload, rules of dispatch, table of peers, tracing."""
