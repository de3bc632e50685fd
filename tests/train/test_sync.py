"""Ways to agree in a world of one: what is refused, what ends, and tensors made where the gradients are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from rota.spec.errors import BadInput
from rota.train.compress import Compression, Kind, average, make_compressor
from rota.train.loop import world
from rota.train.ps.client import PsClient, ServerLost
from rota.train.ps.clocks import Rule
from rota.train.shm import _rows
from rota.train.sync import PsSync, row_optimizer


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with world():
        yield


def stepped(net: nn.Module) -> tuple[PsSync, torch.optim.Optimizer]:
    agree, optimizer = PsSync(Rule(mode="ps_sync"), 1, dist.group.WORLD), torch.optim.SGD(net.parameters(), lr=0.5)
    agree.attach(net)
    net(torch.ones(1, 2, dtype=next(net.parameters()).dtype)).sum().backward()
    agree.update(optimizer)
    return agree, optimizer


def test_a_rate_that_changes_is_refused_by_parameter_servers() -> None:
    agree, optimizer = stepped(nn.Linear(2, 1))
    agree.update(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(BadInput, match=r"rate went from 0\.5 to 0\.25"):
        agree.update(optimizer)
    agree.close()


def test_an_adagrad_that_starts_above_zero_is_refused() -> None:
    with pytest.raises(BadInput, match="initial_accumulator_value"):
        row_optimizer(torch.optim.Adagrad([nn.Parameter(torch.ones(2))], initial_accumulator_value=0.1))


def test_weights_in_half_precision_are_trained() -> None:
    net = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    before = net.weight.detach().clone()
    agree, _ = stepped(net)
    torch.testing.assert_close(net.weight.detach(), before - 0.5)
    agree.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_factored(dtype: torch.dtype) -> None:
    state = make_compressor(Compression(kind="powersgd", rank=1), nn.Identity())
    buffer = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0)).to(dtype).reshape(-1)
    out = average(state, ["w"], buffer.clone(), [buffer.view(8, 8)])
    torch.testing.assert_close(out, buffer, atol=0, rtol=0.02)


def test_servers_want_their_token_and_end_with_the_plan() -> None:
    agree, _ = stepped(nn.Linear(2, 1))
    assert agree._server is not None and agree._server._tcp is not None
    address = f"127.0.0.1:{agree._server._tcp.server_address[1]}"
    with pytest.raises(ServerLost, match="closed the connection"):
        PsClient([address], 7, retry_s=0.1)
    agree.close()
    with pytest.raises(ServerLost, match="refused"):
        PsClient([address], 7, token=agree._server.spec.token, retry_s=0.1)


@pytest.mark.parametrize("kind", [kind for kind in get_args(Kind) if kind != "none"])
def test_compression_makes_its_tensors_where_the_gradients_are(kind: Kind) -> None:
    state = make_compressor(Compression(kind=kind, ratio=1.0, rank=2), nn.Identity())
    gradient = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0))
    buffer = gradient.clone().reshape(-1)
    with torch.device("meta"):  # what is made without a device lands elsewhere
        out = average(state, ["w"], buffer, [buffer.view(8, 8)])
    torch.testing.assert_close(out, gradient.reshape(-1), atol=0.3, rtol=0)


def test_rows_of_an_empty_tensor_are_empty() -> None:
    assert _rows(torch.empty(0), 3).shape == (3, 0)
