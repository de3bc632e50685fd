"""Proof of the package: what other systems decided and published, replayed. Commands find it through its checkout."""
