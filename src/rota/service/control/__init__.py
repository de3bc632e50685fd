"""Control of jobs: intake, checks, the loop that decides, forecasts, and the interface to the engine."""
