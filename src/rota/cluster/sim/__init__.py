"""The scheduler in virtual time: traces, simulation, replay of a log, forecast, reports."""
