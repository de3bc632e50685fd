"""Time of a layer and of a step under a plan.

An operator takes the longer of its arithmetic and its memory traffic (roofline, Williams et al. 2009) plus the launch
of its kernel. The backward pass of a matrix product is two products of the same size. Communication that an overlap
constant does not hide is added. The pipeline is simulated, not estimated.

Symbols: ``T`` tokens of one micro-batch, ``h`` hidden, ``k`` width of keys and values, ``f`` width of the MLP, ``a``
heads, ``s`` sequence, ``t`` tensor degree. Context ranks hold equal parts of the sequence and pass keys and values on
around a ring (Liu et al., "Ring Attention", 2023); what a block of attention takes hides what is sent meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rota.train.plan.hardware import DeviceSpec, Hardware, Link, all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from rota.train.plan.memory import NUMBER_BYTES, expand_layers, held_params, state_bytes
from rota.train.plan.model import Dtype, Layer, Mesh, ModelShape, Offload, ParallelPlan, Stage
from rota.train.plan.schedule import Kind, StageCost, pipeline_s

HALF_BYTES = 2
NORM_BYTES, RESIDUAL_BYTES, GELU_BYTES = 2 * HALF_BYTES, 3 * HALF_BYTES + 1, 2 * HALF_BYTES
"""Bytes moved an element: a norm reads and writes; dropout with residual reads two, writes one and a mask byte; GeLU
reads and writes. Kernels are taken as fused where Megatron-LM fuses them."""
LOSS_TRAFFIC_BYTES = 20
"""Cross entropy over fp32 logits: copy to fp32 (2 + 4), maximum (4), exponentials (4 + 4), gradient (2)."""
SCORE_BYTES = 4 * HALF_BYTES + 1
"""Scale, mask and softmax in one kernel read and write; dropout reads, writes and keeps a mask byte."""
OPERATORS, TP_OPERATORS = 30, 2
"""Operators, views included, that the host dispatches for the forward pass of a layer with fused projections, and the
collectives of a tensor group among them. ``local_hardware._dispatch`` divides by the same number, so that the time of a
layer, the product, does not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one layer for one micro-batch on one rank.

    ``forward_s`` is compute of the forward pass, ``core_s`` the part of it inside attention, which selective recompute
    repeats, ``comm_s`` the exposed communication of one pass. ``host_s`` is what the host needs to dispatch the forward
    pass; a device that is faster waits for it.
    """

    forward_s: float
    core_s: float
    comm_s: float
    host_s: float = 0.0
    ring_s: tuple[float, float] = (0.0, 0.0)
    """Exposed passing of keys and values forward, and of these with their gradients backward."""

    def waits_s(self, layer: Layer) -> float:
        """How long the device waits for its host in both passes."""
        ahead_s = max(self.host_s - self.forward_s - self.comm_s - self.ring_s[0], 0.0)
        back_s = max(2 * self.host_s - 2 * self.forward_s - self.comm_s - self.ring_s[1], 0.0)
        return ahead_s * (2 if layer.recompute == "full" else 1) + back_s

    @property
    def ahead_s(self) -> float:
        """The forward pass as the clock sees it."""
        return max(self.forward_s + self.comm_s + self.ring_s[0], self.host_s)

    @property
    def both_s(self) -> float:
        """Both passes, nothing repeated."""
        return self.ahead_s + self.backward_s(Layer())

    def again_s(self, layer: Layer) -> float:
        """What is computed twice, with its communication."""
        return {"none": 0.0, "selective": self.core_s + self.ring_s[0], "full": self.ahead_s}[layer.recompute]

    def backward_s(self, layer: Layer) -> float:
        """Twice the forward pass, plus what is recomputed."""
        return max(2 * self.forward_s + self.comm_s + self.ring_s[1], 2 * self.host_s) + self.again_s(layer)


def gemm_s(device: DeviceSpec, dtype: str, m: float, n: float, k: float, *, batch: float = 1.0) -> float:
    """Seconds of ``batch`` products of ``m x k`` with ``k x n``: the longer of arithmetic and traffic, plus the launch.

    Arithmetic is ``2 m n k`` operations each at the share of peak that ``DeviceSpec.efficiency`` gives for all of them;
    traffic reads both factors and writes the product once, ``(m k + k n + m n)`` numbers (roofline, Williams 2009).
    """
    flops = 2.0 * m * n * k
    peak = device.peak_tflops[dtype] * 1e12
    compute_s = batch * flops / (peak * device.efficiency(flops * batch))
    moved = batch * (m * k + k * n + m * n) * NUMBER_BYTES[dtype]
    return max(compute_s, moved / (device.memory_gb_s * 1e9)) + device.launch_us * 1e-6


def _stream_s(device: DeviceSpec, size_bytes: float) -> float:
    """Seconds of an element-wise kernel that moves ``size_bytes`` at the share of bandwidth that such kernels reach."""
    return size_bytes / (device.memory_gb_s * 1e9 * device.memory_efficiency) + device.launch_us * 1e-6


def layer_time(
    model: ModelShape, layer: Layer, micro_batch: int, hardware: Hardware, dtype: str, *, cp: int = 1
) -> LayerTime:
    """One transformer layer: attention, MLP, norms, residuals and the collectives of its tensor and context groups.

    The products are query-key-value ``T x (h + 2k)/t x h``, output ``T x h x h/t`` and, for each expert that a token
    visits, the MLP's ``T x f/t x h`` (twice when gated) and ``T x h x f/t`` (Shoeybi et al., "Megatron-LM", 2019,
    section 3). Two norms and two residuals work on ``T h`` numbers, split with ``sp``. A tensor group sums ``T h``
    numbers twice in each pass; with ``sp`` the same bytes go as reduce-scatter and all-gather (Korthikanti et al.
    2022).
    """
    device, t = hardware.device, layer.tp
    tokens, h = micro_batch * model.seq / cp, model.hidden
    kv = model.key_heads * model.head_dim
    matrices = 2 if model.gated else 1
    top_k = model.top_k if model.experts else 1
    core_s = _attention_core_s(model, micro_batch, t, device, dtype, cp)
    dense_s = (
        gemm_s(device, dtype, tokens, (h + 2 * kv) / t, h)
        + gemm_s(device, dtype, tokens, h, h / t)
        + top_k * gemm_s(device, dtype, tokens, matrices * model.inner / t, h)
        + top_k * gemm_s(device, dtype, tokens, h, model.inner / t)
    )
    split = t if layer.sp else 1
    light_s = 2 * _stream_s(device, tokens * h * NORM_BYTES / split) + 2 * _stream_s(
        device, tokens * h * RESIDUAL_BYTES / split
    )
    light_s += _stream_s(device, tokens * model.inner * matrices * GELU_BYTES / t)
    link = hardware.link_of(t)
    size = tokens * h * NUMBER_BYTES[dtype]
    one_s = reduce_scatter_s(t, size, link) + all_gather_s(t, size, link) if layer.sp else all_reduce_s(t, size, link)
    comm_s = 2 * one_s * (1 - hardware.overlap.tp)
    host_s = (OPERATORS + (TP_OPERATORS if t > 1 else 0)) * device.dispatch_us * 1e-6
    keys = 2 * tokens * kv / t * NUMBER_BYTES[dtype]
    ring_s = _ring_s(cp, keys, core_s / cp, hardware.link_of(cp, t)) if cp > 1 else (0.0, 0.0)
    return LayerTime(forward_s=dense_s + core_s + light_s, core_s=core_s, comm_s=comm_s, host_s=host_s, ring_s=ring_s)


def _ring_s(cp: int, size_bytes: float, block_s: float, link: Link) -> tuple[float, float]:
    """Keys and values are sent ``cp - 1`` times beside a block; backward, with their gradients, ``cp`` times."""
    ahead_s = (cp - 1) * max(send_s(size_bytes, link) - block_s, 0.0)
    return ahead_s, cp * max(send_s(2 * size_bytes, link) - 2 * block_s, 0.0)


def layer_flops(model: ModelShape, micro_batch: int) -> float:
    """Floating-point operations of the products of one layer's forward pass: ``2 T h (2h + 2k + m f) + 4 T s h``.

    ``m`` is the number of matrices of all MLPs that a token visits (Narayanan et al., SC21, appendix).
    """
    tokens, h, kv = float(micro_batch * model.seq), model.hidden, model.key_heads * model.head_dim
    wide = (3 if model.gated else 2) * model.inner * (model.top_k if model.experts else 1)
    return 2 * tokens * h * (2 * h + 2 * kv + wide) + 4 * tokens * model.seq * h


def _attention_core_s(model: ModelShape, micro_batch: int, t: int, device: DeviceSpec, dtype: str, cp: int) -> float:
    """``cp`` blocks, each of the queries of a rank with the keys of one."""
    heads, d, s = micro_batch * model.heads / t, model.head_dim, model.seq / cp
    block_s = gemm_s(device, dtype, s, s, d, batch=heads) + gemm_s(device, dtype, s, d, s, batch=heads)
    if model.attention != "flash":
        block_s += _stream_s(device, heads * s * s * SCORE_BYTES)
    return cp * block_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step; the classes of ``breakdown_s`` add up to ``total_s``."""

    total_s: float
    breakdown_s: dict[str, float]


def step_time(plan: ParallelPlan, model: ModelShape, hardware: Hardware) -> StepTime:
    """Predict one step of a plan that has passed ``check``."""
    mesh, dtype, pp = plan.mesh, plan.dtype.param, plan.mesh.pp
    times = {
        run: layer_time(model, run, plan.micro_batch, hardware, dtype, cp=mesh.cp)
        for run in {replace(layer, count=1) for layer in plan.layers}
    }
    last_s = head_s(model, plan.head.tp, plan.micro_batch, hardware, dtype, cp=mesh.cp)
    work = _stage_works(plan, times, last_s)
    costs = [[one.cost for one in work[rank::pp]] for rank in range(pp)]
    micro = plan.micro_batches
    hops_s = transfers_s(model, mesh, plan.micro_batch, hardware, dtype)
    total_s = pipeline_s(_order_of(plan), micro, costs, transfers_s=hops_s)
    busy_s = [micro * sum(cost.forward_s + cost.backward_s for cost in rank) for rank in costs]
    busiest = max(range(pp), key=busy_s.__getitem__)
    again_s = micro * sum(one.again_s for one in work[busiest::pp])
    comm_s = micro * sum(one.comm_s for one in work[busiest::pp])
    ring_s = micro * sum(one.ring_s for one in work[busiest::pp])
    host_s = micro * sum(one.host_s for one in work[busiest::pp])
    kept = state_time(state_placement(plan), hardware, held_params(plan, model), layers_max(plan))
    parts = {
        "compute": busy_s[busiest] - again_s - comm_s - ring_s - host_s,
        "host": host_s,
        "recompute": again_s,
        "tp": comm_s,
        "cp": ring_s,
        "bubble": total_s - busy_s[busiest],
        "dp": kept.exposed_s(hardware, busy_s[busiest]),
        "optimizer": kept.optimizer_s,
        "offload": kept.offload_s,
    }
    return StepTime(total_s=sum(parts.values()), breakdown_s=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageWork:
    """What one stage costs for one micro-batch: both passes, and in them what is computed twice, the communication of
    tensor and of context ranks and the waits for the host."""

    cost: StageCost
    again_s: float
    comm_s: float
    ring_s: float
    host_s: float


def _stage_works(plan: ParallelPlan, times: Mapping[Layer, LayerTime], last_s: float) -> list[_StageWork]:
    """The work of every stage in order; ``times`` has each kind of layer with ``count`` 1, ``last_s`` the head."""
    per_layer = [replace(layer, count=1) for layer in expand_layers(plan)]
    return [_stage_work(stage, per_layer, times, last_s) for stage in plan.stages]


def _stage_work(stage: Stage, per_layer: list[Layer], times: Mapping[Layer, LayerTime], last_s: float) -> _StageWork:
    forward_s = backward_s = again_s = comm_s = ring_s = host_s = 0.0
    for layer, count in Counter(per_layer[stage.layers[0] : stage.layers[1]]).items():
        time = times[layer]
        forward_s += count * time.ahead_s
        backward_s += count * time.backward_s(layer)
        again_s += count * {"none": 0.0, "selective": time.core_s, "full": time.forward_s}[layer.recompute]
        comm_s += count * time.comm_s * (3 if layer.recompute == "full" else 2)
        ring_s += count * (time.ring_s[0] * (1 if layer.recompute == "none" else 2) + time.ring_s[1])
        host_s += count * time.waits_s(layer)
    if stage.head:
        forward_s, backward_s = forward_s + last_s, backward_s + 2 * last_s
    cost = StageCost(forward_s=forward_s, backward_s=backward_s)
    return _StageWork(cost=cost, again_s=again_s, comm_s=comm_s, ring_s=ring_s, host_s=host_s)


def _order_of(plan: ParallelPlan) -> Kind:
    """The schedule that is simulated; zero-bubble ones as 1F1B, which is not faster."""
    if plan.schedule == "interleaved" or plan.schedule == "gpipe":
        return plan.schedule
    return "1f1b"


def head_s(model: ModelShape, tp: int, micro_batch: int, hardware: Hardware, dtype: str, *, cp: int = 1) -> float:
    """Seconds of the product ``T x V/t x h`` with the vocabulary ``V`` and of the loss over ``T V/t`` logits."""
    tokens, vocab = micro_batch * model.seq / cp, model.vocab / tp
    loss_s = _stream_s(hardware.device, tokens * vocab * LOSS_TRAFFIC_BYTES)
    return gemm_s(hardware.device, dtype, tokens, vocab, model.hidden) + loss_s


def transfers_s(model: ModelShape, mesh: Mesh, micro_batch: int, hardware: Hardware, dtype: str) -> list[float]:
    """Activations from each pipeline rank to the next, the last to the first.

    Each tensor rank sends its slice, over the level that holds both stages, and the receivers gather it in their node.
    """
    pp, tp = mesh.pp, mesh.tp
    if pp == 1:
        return [0.0]
    size = micro_batch * model.seq / mesh.cp * model.hidden * NUMBER_BYTES[dtype]
    gather_s, wide = all_gather_s(tp, size, hardware.link_of(tp)), mesh.world // pp
    ends = [(rank * wide, (rank + 2) * wide - 1) for rank in range(pp - 1)] + [(0, mesh.world - 1)]
    return [(send_s(size / tp, hardware.link_over(*end)) + gather_s) * (1 - hardware.overlap.pp) for end in ends]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlacement:
    """Who keeps the state of a layer: ``ranks`` data and context ranks, ``tp`` apart."""

    ranks: int
    tp: int
    zero: int
    offload: Offload
    micro_batches: int
    dtype: Dtype


def state_placement(plan: ParallelPlan) -> StatePlacement:
    """Of a plan: the highest ZeRO stage of its layers, the offload of the first."""
    return StatePlacement(
        ranks=plan.mesh.dp * plan.mesh.cp,
        tp=plan.mesh.tp,
        zero=max((layer.zero for layer in plan.layers), default=0),
        offload=plan.layers[0].offload,
        micro_batches=plan.micro_batches,
        dtype=plan.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTime:
    """Seconds of one step for state: gradients and parameters of data ranks, the optimizer, the link to the host."""

    reduce_s: float
    gather_s: float
    optimizer_s: float
    offload_s: float

    def exposed_s(self, hardware: Hardware, busy_s: float) -> float:
        """The part of the exchange that does not hide behind ``busy_s`` of computation."""
        overlap = hardware.overlap
        gathered = overlap.dp if overlap.gather is None else overlap.gather
        hidden_s = overlap.dp * self.reduce_s + gathered * self.gather_s
        return self.reduce_s + self.gather_s - min(hidden_s, busy_s)

    def total_s(self, hardware: Hardware, busy_s: float) -> float:
        """All three as the clock sees them."""
        return self.exposed_s(hardware, busy_s) + self.optimizer_s + self.offload_s


def state_time(kind: StatePlacement, hardware: Hardware, held: float, layers: int) -> StateTime:
    """Of a rank that holds ``held`` parameters in ``layers`` layers; more of either is never faster.

    Adam (Kingma and Ba 2015) reads and writes master, moments, gradient and parameter once. The link to the host is
    hidden by nothing, and host memory is taken to be as fast. With the optimizer there, gradients go down and weights
    come up once a step; with all of the state there, weights come up each time that they are gathered, and gradients go
    down with every micro-batch.
    """
    stepped, costs = held / (kind.ranks if kind.zero else 1), state_bytes(kind.dtype)
    size = stepped * 2 * costs.total
    reduce_s, gather_s = _exchange_s(kind, hardware, held, 1 + layers) if kind.ranks > 1 else (0.0, 0.0)
    if kind.offload == "none":
        optimizer_s = _stream_s(hardware.device, size)
        return StateTime(reduce_s=reduce_s, gather_s=gather_s, optimizer_s=optimizer_s, offload_s=0.0)
    up = down = 1
    if kind.offload.startswith("all"):
        down = kind.micro_batches
        up = 2 * kind.micro_batches if kind.zero == 3 else 1
    rate = hardware.host.gb_s * 1e9
    moved = stepped * (up * costs.param + down * costs.grad)
    return StateTime(reduce_s=reduce_s, gather_s=gather_s, optimizer_s=size / rate, offload_s=moved / rate)


def _exchange_s(kind: StatePlacement, hardware: Hardware, held: float, pieces: int) -> tuple[float, float]:
    """Gradients and parameters that data and context ranks exchange, over the slowest level that they span.

    After Rajbhandari et al., "ZeRO" (2020), section 7: ZeRO 0 and 1 reduce gradients once a step, 1 sends what each
    rank stepped; 2 scatters gradients each micro-batch and gathers parameters once; 3 gathers parameters in both passes
    of each micro-batch and scatters gradients. Under 2 and 3 each layer is a collective of its own, and the embedding
    with the head one more.
    """
    ranks, link, micro = kind.ranks, hardware.link_of(kind.ranks, kind.tp), kind.micro_batches
    gradients, params = held * NUMBER_BYTES[kind.dtype.reduce], held * NUMBER_BYTES[kind.dtype.param]
    if kind.zero < 2:
        stepped = held * NUMBER_BYTES[kind.dtype.master] if kind.zero else 0.0
        return all_reduce_s(ranks, gradients, link), all_gather_s(ranks, stepped, link) if kind.zero else 0.0
    scatter_s = pieces * reduce_scatter_s(ranks, gradients / pieces, link)
    gather_s = pieces * all_gather_s(ranks, params / pieces, link)
    return micro * scatter_s, gather_s if kind.zero == 2 else 2 * micro * gather_s


def layers_max(plan: ParallelPlan) -> int:
    """Layers of the rank with the most."""
    pp = plan.mesh.pp
    return max(sum(one.layers[1] - one.layers[0] for one in plan.stages[rank::pp]) for rank in range(pp))
