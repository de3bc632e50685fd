"""The same training in one process, without a job: the batches of two trainers in turn."""

from __future__ import annotations

import numpy as np
import ps_embedding as job
import words

from rota.train.data import StaticOrder
from rota.train.ps.table import ParameterTable

tables = {spec.name: ParameterTable(spec) for spec in job.TABLES}
orders = [StaticOrder(len(words.corpus().train)) for _ in range(2)]
loss = 0.0
for clock in range(job.ROUNDS * job.CLOCKS):
    for worker in range(2):
        epoch, _ = orders[worker].cursor
        word, candidates = words.batch(orders[worker].take(2 * words.BATCH, worker, 2), epoch)
        near = tables["near"].pull(candidates.reshape(-1)).reshape(*candidates.shape, job.DIM)
        loss, of_words, of_near = words.gradients(tables["words"].pull(word), near)
        tables["words"].push(word, of_words)
        tables["near"].push(candidates.reshape(-1), of_near.reshape(-1, job.DIM))
    if (clock + 1) % job.CLOCKS == 0:
        every = np.arange(len(words.corpus().words))
        right = words.ranked_right(tables["words"].pull(every), tables["near"].pull(every))
        print(f"round {(clock + 1) // job.CLOCKS}: loss {loss:.3f}, held-out pairs ranked right {right:.3f}")
