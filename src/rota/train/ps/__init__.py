"""Parameter server: consistency clocks, shards of dense ranges and sparse tables, and their client."""

from rota.train.ps.clocks import Rule as Rule
