"""Clock, processes, event log (SQL), Redis and Ray, which other packages use through this one; with twins in memory."""
