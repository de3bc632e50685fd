"""Training that would be silently wrong: refused by name before a rank is needed, or made right; in one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rota.spec.errors import BadInput
from rota.train.apply import Parallel, check_model, cross_entropy_sum, parallelize
from rota.train.batch import FACTOR, LossScale, in_two, micro_batches
from rota.train.loop import world
from rota.train.parallel.context_parallel import AttentionRing, Ulysses
from rota.train.parallel.model_parts import Parts
from rota.train.plan.model import Dtype, Layer, Mesh, ParallelPlan, Sync, data_parallel
from tests.train import structures
from tests.train.structures import ADAMW, BATCH, RING, SEQ, WORDS, Core

ULYSSES = replace(RING, cp_kind="ulysses")
ALONE = structures.plan(Mesh())


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with world():
        yield


class Dropping(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


class Turning(nn.Module):
    """Turns its queries by their places."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * torch.arange(q.shape[2])[:, None].cos(), k, v, is_causal=True)


class Sharp(nn.Module):
    """By hand, with a scale of its own."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class ByHead(nn.Module):
    """A slope for each head, by its number."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        slopes = torch.arange(1, q.shape[1] + 1)[:, None, None]
        far = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=-0.1 * slopes * far.abs())


def words(core: nn.Module) -> structures.Words:
    return structures.Words(lambda _: structures.Block(structures.Attention(core, norms=False), structures.Gated()))


CORES: dict[str, tuple[nn.Module, ParallelPlan, str]] = {
    "window": (Core(window=5), RING, r"ring: the core of layer 0 \(Core\) gives a mask"),
    "dropout": (Dropping(), RING, r"\(Dropping\) drops 0\.1 of the attention"),
    "places": (Turning(), RING, r"\(Turning\) turns q, k, v or the output by their places"),
    "by hand": (Sharp(), RING, r"\(Sharp\) does not call F\.scaled_dot_product_attention and is not the softmax"),
    "by head": (ByHead(), ULYSSES, r"ulysses: the core of layer 0 \(ByHead\) treats heads by their number"),
}


@pytest.mark.parametrize("name", CORES)
def test_attention_that_ranks_would_compute_otherwise_is_refused(name: str) -> None:
    core, plan, text = CORES[name]
    with pytest.raises(BadInput, match=text):
        check_model(words(core), plan, Parts())


def test_a_core_that_ends_the_process_is_not_taken_for_one_that_cannot_be_looked_at() -> None:
    class Ends(Core):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        check_model(words(Ends()), RING, Parts())


@pytest.mark.parametrize("core", [Core(is_causal=False), Core(scale=0.3), Core(own=True)])
def test_attention_that_a_ring_computes_is_looked_at_and_left_as_it_was(core: nn.Module) -> None:
    model = words(core).train()
    check_model(model, RING, Parts())
    assert "forward" not in vars(core)
    assert all(part.training for part in model.modules())
    assert model.embed.positions is None


def test_a_window_as_long_as_a_part_of_the_sequence_is_seen_in_the_whole() -> None:
    from rota.train.parallel.context_parallel import inspect_core

    core, q = Core(window=8), torch.empty(1, 2, 8, 4)
    with pytest.raises(BadInput, match="gives a mask"):
        inspect_core("the core", core, q, 2, 4, ranks=2, part=8)


def test_layers_that_count_places_in_what_they_are_given_are_refused() -> None:
    for plan in (RING, ULYSSES):
        with pytest.raises(BadInput, match=r"mesh\.cp = 2: layer 0 \(Block\) treats a token by its place"):
            check_model(structures.lost(), plan, Parts())
        check_model(structures.rotary(), plan, Parts())


def step_of(loss: Any, plan: ParallelPlan = ALONE) -> Parallel:
    torch.manual_seed(0)
    made = parallelize(structures.qwen(), plan, optimizer=ADAMW, loss=loss)
    made.step(*next(structures.batches(1)))
    return made


def test_a_loss_that_is_a_mean_is_refused_before_a_weight_changes() -> None:
    def mean(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    model = structures.qwen()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    made = parallelize(model, ALONE, optimizer=ADAMW, loss=mean)
    with pytest.raises(
        BadInput, match=r"loss: gives \d\.\d+ for one sequence and \d\.\d+ for two copies of it"
    ) as error:
        made.step(*next(structures.batches(1)))
    assert "reduction='sum'" in error.value.hint
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_loss_of_whole_micro_batches_is_taken_as_it_is() -> None:
    def whole_only(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy_sum(output.view(BATCH // 2, SEQ, WORDS), targets)

    whole = step_of(whole_only).step(*next(structures.batches(1))).loss
    scaled = step_of(lambda output, targets: 0.3 * cross_entropy_sum(output, targets)).step(
        *next(structures.batches(1))
    )
    assert 0.0 < scaled.loss < whole


def test_rows_of_other_ranks_are_refused() -> None:
    with pytest.raises(BadInput, match="targets has 3 sequences, this rank trains 4"):
        inputs, targets = next(structures.batches(1))
        parallelize(structures.qwen(), ALONE, optimizer=ADAMW).step(inputs, targets[:3])


def test_a_mapping_is_split_by_rows_and_needs_labels() -> None:
    ids = torch.arange(8).view(4, 2)
    inputs, targets = in_two({"input_ids": ids, "use_cache": False, "labels": ids + 1}, None)
    assert isinstance(inputs, dict) and torch.equal(targets, ids + 1)
    halves = micro_batches(inputs, 2)
    assert [half["input_ids"].tolist() for half in halves] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]  # type: ignore[index]
    assert all(half["use_cache"] is False for half in halves)  # type: ignore[index]
    with pytest.raises(BadInput, match=r"a mapping of input_ids has no 'labels'"):
        in_two({"input_ids": ids}, None)


def test_zero_3_of_a_model_without_layers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    whole = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
    plan = replace(data_parallel(layers=4, dp=2, zero=3), embed=Layer())
    with caplog.at_level(logging.WARNING, logger="rota.train"):
        check_model(whole, plan, Parts())
        assert "zero = 3: Sequential has no 'layers', so its weights are gathered all at once" in caplog.text
        caplog.clear()
        check_model(structures.Normed(), data_parallel(layers=1, dp=2, zero=3), Parts())
    assert not caplog.text


SHARDED = structures.plan(Mesh(), Layer(zero=3), dtype=Dtype(param="bf16"))


@pytest.mark.parametrize("kind", ["Adafactor", "Rprop", "LBFGS"])
def test_an_optimizer_that_cannot_step_parts_is_refused_and_one_of_whole_parameters_steps(kind: str) -> None:
    make = getattr(torch.optim, kind)
    with pytest.raises(BadInput, match=f"optimizer: {kind} "):
        parallelize(structures.qwen(), SHARDED, optimizer=make)
    if kind != "LBFGS":
        parallelize(structures.qwen(), ALONE, optimizer=make).step(*next(structures.batches(1)))


def test_weights_that_a_model_lacks_are_not_taken_over() -> None:
    made = parallelize(structures.qwen(), ALONE, optimizer=ADAMW)
    state = made.state_dict()
    with pytest.raises(BadInput, match=r"this model has no model\.layers\.2\.w \(continue"):
        made.load({**state, "model.layers.2.w": torch.ones(1)})
    with pytest.raises(BadInput, match=r"model\.head\.weight of shape \(13, 16\) has shape \(1, 16\) in it"):
        made.load({**state, "model.head.weight": torch.ones(1, 16)})


TINY = 1e-6
"""Of a loss whose gradients are below the smallest number of fp16."""


def tiny(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return TINY * cross_entropy_sum(output, targets)


def losses_in(dtype: Dtype) -> list[float]:
    torch.manual_seed(0)
    made = parallelize(
        structures.qwen(), replace(ALONE, dtype=dtype), optimizer=partial(torch.optim.SGD, lr=0.5 / TINY), loss=tiny
    )
    return [made.step(inputs, targets).loss / TINY for inputs, targets in list(structures.batches(1)) * 6]


def test_small_gradients_are_not_lost_in_fp16() -> None:
    whole, half = losses_in(Dtype()), losses_in(Dtype(param="fp16"))
    assert whole[-1] < whole[0] - 0.5
    assert half == pytest.approx(whole, abs=0.02)


def test_the_scale_of_the_loss_goes_down_with_an_overflow_and_comes_back() -> None:
    scale, weight = LossScale(), nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, float("inf")])
    assert not scale.scale_back([weight], torch.device("cpu"))
    assert scale.factor == FACTOR / 2
    for _ in range(2000):
        weight.grad = torch.ones(2)
        assert scale.scale_back([weight], torch.device("cpu"))
    assert scale.factor == FACTOR
    assert torch.equal(weight.grad, torch.full((2,), 2 / FACTOR))


def test_fp16_that_no_scale_saves_is_refused() -> None:
    with pytest.raises(BadInput, match=r"dtype\.master = fp16: steps below 1/2048 of a weight are lost"):
        check_model(structures.qwen(), replace(ALONE, dtype=Dtype(param="fp16", master="fp16")), Parts())
    plan = replace(ALONE, dtype=Dtype(param="fp16"), sync=Sync(compression="topk"))
    with pytest.raises(
        BadInput, match=r"param fp16, reduce fp32: gradients have a scale that changes, .* compression topk"
    ):
        check_model(structures.qwen(), plan, Parts())


def test_a_core_that_is_given_a_mask_is_refused() -> None:
    class Masked(structures.Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(self.core(q, k, v, torch.zeros(x.shape[1])).transpose(1, 2).flatten(2))

    group: Any = dist.group.WORLD
    for spans in (AttentionRing("the core", Core(), group), Ulysses("the core", Core(), group)):
        model = structures.Words(lambda _: structures.Block(Masked(Core(), norms=False), structures.Gated()))
        model.layers[0].self_attn.core.forward = spans  # type: ignore[union-attr]
        with pytest.raises(BadInput, match="the core is called with more than q, k and v"):
            model(torch.zeros(1, 4, dtype=torch.long))
