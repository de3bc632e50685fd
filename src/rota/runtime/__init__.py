"""Clock, processes, event log (SQL), Redis and Ray, which other packages use only through this one."""
