"""ShardedEmbedding: rows on parameter servers, fetched for each batch; the dense rest of the model by all-reduce."""

from __future__ import annotations

import torch
from torch import nn

from rota.train.ps.client import PsClient


class ShardedEmbedding(nn.Module):
    """An embedding whose rows [V, dim] live in a table of the servers; only those of a batch are here.

    The iteration is the caller's: ``client.wait_turn()``, forward, backward, ``push()`` of each embedding,
    ``client.tick()``. A module has no parameters, so DistributedDataParallel and the dense optimizer leave it alone.
    Gradients are those of this worker's loss: ps_sync applies their mean, as all-reduce does for the dense part.
    """

    def __init__(self, client: PsClient, table: str) -> None:
        super().__init__()
        self._client, self._table = client, table
        self._fetched: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., dim] of ids [...]; each distinct id is fetched once."""
        distinct, back = torch.unique(ids, return_inverse=True)
        rows = torch.from_numpy(self._client.pull(self._table, distinct.numpy()))
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._fetched.append((distinct, rows))
        return rows[back]

    def push(self) -> None:
        """Hand the gradients since the last ``push`` to the client, which sends them with its tick."""
        for distinct, rows in self._fetched:
            if rows.grad is not None:
                self._client.push(self._table, distinct.numpy(), rows.grad.numpy())
        self._fetched.clear()
