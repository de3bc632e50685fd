"""Plug-ins of the scheduling cycle, one file a policy, one row a profile."""
