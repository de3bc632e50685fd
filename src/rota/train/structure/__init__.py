"""Models that were not written for plans: their parts found in their own structure, cut, and proved on an example."""
