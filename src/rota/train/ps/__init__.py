"""Parameter server: clocks that decide, shards that hold dense ranges and sparse tables, and their client."""

from rota.train.ps.clocks import Rule as Rule
