"""Time of a collective by level of the topology (alpha-beta model).

``K`` ranks, ``N`` bytes of the whole tensor, ``B`` bytes a second of one device in one direction, ``a`` seconds of
latency of one message. Formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005); the pipelined broadcast is Patarasu and Yuan (2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device can send over a level: gigabytes (10^9) a second in one direction, latency in microseconds."""

    gb_s: float
    latency_us: float = 0.0

    @property
    def seconds_per_byte(self) -> float:
        """1 / B."""
        return 1.0 / (self.gb_s * 1e9)

    @property
    def latency_s(self) -> float:
        """a."""
        return self.latency_us * 1e-6


def broadcast_s(ranks: int, size_bytes: float, link: Link, *, pieces: int = 1) -> float:
    """Along a ring in ``pieces``: ``N (S + K - 2) / (S B)``; with one piece ``(K - 1) N / B``."""
    if ranks < 2:
        return 0.0
    steps = pieces + ranks - 2
    return steps * (size_bytes / pieces * link.seconds_per_byte + link.latency_s)


def all_reduce_s(ranks: int, size_bytes: float, link: Link) -> float:
    """The cheaper of ring, ``2 (K-1)/K N/B + 2 (K-1) a``, and tree, ``2 N/B + 2 log2(K) a``."""
    if ranks < 2:
        return 0.0
    moved = size_bytes * link.seconds_per_byte
    ring = 2 * (ranks - 1) / ranks * moved + 2 * (ranks - 1) * link.latency_s
    tree = 2 * moved + 2 * math.ceil(math.log2(ranks)) * link.latency_s
    return min(ring, tree)


def reduce_scatter_s(ranks: int, size_bytes: float, link: Link) -> float:
    """``(K-1)/K N/B + (K-1) a``; ``N`` is the full size."""
    if ranks < 2:
        return 0.0
    return (ranks - 1) / ranks * size_bytes * link.seconds_per_byte + (ranks - 1) * link.latency_s


def all_gather_s(ranks: int, size_bytes: float, link: Link) -> float:
    """The same as reduce-scatter; ``N`` is the gathered size."""
    return reduce_scatter_s(ranks, size_bytes, link)


def send_s(size_bytes: float, link: Link) -> float:
    """Point to point: ``N/B + a``."""
    return size_bytes * link.seconds_per_byte + link.latency_s


def hierarchical_all_reduce_s(inner: int, outer: int, size_bytes: float, inner_link: Link, outer_link: Link) -> float:
    """Reduce-scatter inside, all-reduce of the slices across, all-gather inside."""
    across = all_reduce_s(outer, size_bytes / max(inner, 1), outer_link)
    inside = reduce_scatter_s(inner, size_bytes, inner_link) + all_gather_s(inner, size_bytes, inner_link)
    return inside + across


def parameter_server_s(workers: int, servers: int, size_bytes: float, worker_link: Link, server_link: Link) -> float:
    """Push and pull of every worker: ``max(2 N/B_worker, 2 W N / (n B_server)) + 2 a``."""
    worker_s = 2 * size_bytes * worker_link.seconds_per_byte
    server_s = 2 * workers * size_bytes * server_link.seconds_per_byte / servers
    return max(worker_s, server_s) + 2 * worker_link.latency_s
