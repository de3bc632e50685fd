"""The service process: settings, start, loop, supervision."""
