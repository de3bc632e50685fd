"""Readers of model files (native, Hugging Face ``config.json``, Calculon) and of hardware files of other tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from rota.spec import codec
from rota.spec.errors import BadInput
from rota.train.plan.cost import layer_flops
from rota.train.plan.hardware import (
    A100_80G_DGX,
    DeviceSpec,
    Hardware,
    Json,
    LevelSpec,
    Overlap,
    hardware_from_json,
    refuse_unknown,
)
from rota.train.plan.model import ModelShape

REQUIRED = ("layers", "hidden", "heads", "seq", "vocab")
NUMBER_MAX, LAYERS_MAX = 2**30, 10_000
"""The time of a search grows with the layers; all numbers together still fit a float."""

HUGGING_FACE = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "max_position_embeddings": "seq",
    "vocab_size": "vocab",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "tie_word_embeddings": "tied",
    "num_local_experts": "experts",
    "num_experts_per_tok": "top_k",
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_head": "heads",
    "n_positions": "seq",
    "n_inner": "ffn",
}
"""Field names of ``config.json``: the common ones, then GPT-2's."""
CALCULON = {
    "feedforward": "ffn",
    "seq_size": "seq",
    "attn_heads": "heads",
    "num_blocks": "layers",
    "hidden": "hidden",
    "name": "name",
}
CALCULON_VOCAB = 51200
"""Files of Calculon have no vocabulary; this is that of the models of Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM" (SC'21), section 5."""
CALCULON_FORM = (
    "needed are matrix.float16 (gflops or tflops, gflops_efficiency), mem1 (GiB, GBps, MB_efficiency), networks (each "
    "with size, bandwidth): numbers"
)
GATED_ACTIVATIONS = ("silu", "swiglu", "geglu")


def model_from_json(raw: object) -> tuple[ModelShape, tuple[str, ...]]:
    """A model and the warnings about what had to be assumed.

    Raises BadInput that names the field for a form that is not known, a missing or malformed value.
    """
    if not isinstance(raw, Mapping):
        raise BadInput(f"model: expected an object, got {type(raw).__name__}")
    fields = {str(key): value for key, value in cast("Json", raw).items()}
    if "num_blocks" in fields or "attn_heads" in fields:
        return _native(*_model_of_calculon(fields))
    if "hidden_size" in fields or "n_embd" in fields:
        return _native(_model_of_hugging_face(fields), ())
    return _native(fields, ())


def _model_of_calculon(fields: Json) -> tuple[Json, tuple[str, ...]]:
    made = {CALCULON[key]: value for key, value in fields.items() if key in CALCULON}
    warning = f"vocab: Calculon files have none; {CALCULON_VOCAB} is assumed"
    return {**made, "vocab": CALCULON_VOCAB, "attention": "plain"}, (warning,)


def _model_of_hugging_face(fields: Json) -> Json:
    made = {HUGGING_FACE[key]: value for key, value in fields.items() if key in HUGGING_FACE and value is not None}
    activation = fields.get("hidden_act", fields.get("activation_function", ""))
    return {
        **made,
        "gated": activation in GATED_ACTIVATIONS,
        "tied": bool(fields.get("tie_word_embeddings", True)),
        "name": str(fields.get("_name_or_path") or fields.get("model_type") or ""),
    }


def _native(fields: Json, warnings: tuple[str, ...]) -> tuple[ModelShape, tuple[str, ...]]:
    refuse_unknown(ModelShape, fields, "model")
    for key in REQUIRED:
        if key not in fields:
            raise BadInput(f"model.{key}: missing", hint=f"required are {', '.join(REQUIRED)}")
    try:
        model: ModelShape = codec.from_json_value(ModelShape, fields)
    except (TypeError, ValueError) as error:
        raise BadInput(f"model: {error}") from error
    for key in (*REQUIRED, "top_k"):
        if getattr(model, key) < 1:
            raise BadInput(f"model.{key}: {getattr(model, key)} is below 1")
    for key in (*REQUIRED, "kv_heads", "ffn", "experts", "top_k"):
        limit = LAYERS_MAX if key == "layers" else NUMBER_MAX
        if getattr(model, key) > limit:
            raise BadInput(f"model.{key}: {getattr(model, key)} is above {limit}")
    if model.hidden % model.heads:
        raise BadInput(f"model.heads: hidden {model.hidden} does not divide by heads {model.heads}")
    if model.heads % model.key_heads:
        raise BadInput(f"model.kv_heads: heads {model.heads} does not divide by kv_heads {model.kv_heads}")
    return model, warnings


_LAYER = re.compile(r"^layertype_0_bsz(\d+)_seq(\d+)$")
_RING = re.compile(r"^allreduce_size_(\d+)_consec_1$")
FREE_GB_S = 1e6
"""Measured layers hold their element-wise kernels already, so these cost nothing more."""


def hardware_from_any(raw: object) -> Hardware:
    """A hardware file of this project, or a Calculon system file. Raises BadInput that names the field."""
    if not isinstance(raw, Mapping):
        raise BadInput(f"hardware: expected an object, got {type(raw).__name__}")
    fields = cast("Json", raw)
    return _hardware_of_calculon(fields) if "matrix" in fields and "mem1" in fields else hardware_from_json(fields)


def _hardware_of_calculon(raw: Json) -> Hardware:
    try:
        matrix, memory = raw["matrix"]["float16"], raw["mem1"]
        points = sorted((float(gflops) * 1e9, float(share)) for gflops, share in matrix["gflops_efficiency"])
        peak = float(matrix.get("tflops") or float(matrix["gflops"]) / 1e3)
        shares = [float(share) for _, share in memory["MB_efficiency"]]
        levels = _levels_of_calculon(raw["networks"])
        gib, gb_s = float(memory["GiB"]), float(memory["GBps"])
    except (KeyError, TypeError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"has a value of another form: {error}"
        raise BadInput(f"hardware: the Calculon system {what}", hint=CALCULON_FORM) from error
    return Hardware(
        name="calculon-system",
        provenance="a Calculon system file: matrix units at float16, first memory, networks from the inside out",
        device=DeviceSpec(
            memory_gib=gib,
            memory_gb_s=gb_s,
            memory_efficiency=max(shares),
            peak_tflops=dict.fromkeys(("bf16", "fp16", "fp32"), peak),
            launch_us=0.0,
            gemm_efficiency=tuple((max(flops, 1.0), share) for flops, share in points),
        ),
        levels=levels,
        overlap=Overlap(dp=0.0),
    )


def _levels_of_calculon(networks: Sequence[Json]) -> tuple[LevelSpec, ...]:
    levels: list[LevelSpec] = []
    held = 1
    for index, network in enumerate(networks):
        size = int(network["size"])
        last = index == len(networks) - 1
        levels.append(
            LevelSpec(
                name=f"network {index}",
                size=None if last else max(size // held, 1),
                gb_s=float(network["bandwidth"]) * float(network.get("efficiency", 1.0)),
                latency_us=float(network.get("latency", 0.0)) * 1e6,
            )
        )
        held = size
    return tuple(levels)


def from_galvatron(files: Mapping[str, Json], model: ModelShape) -> tuple[Hardware, ModelShape]:
    """A Galvatron profile folder, file name to content, as hardware, and the model that was profiled as measured there.

    The measured forward milliseconds of a layer a sample become the efficiency curve, the bandwidths of its all-reduces
    the levels (Galvatron gives the bus bandwidth of a ring), its activation memory that of the model. Raises BadInput
    for what is missing.
    """
    times = _matches(files, "computation_profiling_bf16", _LAYER)
    rings = {ranks: gb_s for (ranks,), gb_s in _matches(files, "allreduce_bandwidth_1nodes", _RING).items()}
    wide = {ranks: gb_s for (ranks,), gb_s in _matches(files, "allreduce_bandwidth_2nodes", _RING).items()}
    at = {batch: ms for (batch, seq), ms in times.items() if seq == model.seq}
    if not at or not rings:
        missing = f"layer times at seq {model.seq}" if rings else "all-reduce bandwidths of one node"
        raise BadInput(f"hardware: the Galvatron profile has no {missing}")
    device = A100_80G_DGX.device
    peak = device.peak_tflops["bf16"] * 1e12
    curve = tuple(
        sorted(
            (layer_flops(model, batch) / 4, min(1.0, layer_flops(model, batch) / (batch * ms * 1e-3 * peak)))
            for batch, ms in at.items()
        )
    )
    size = max(rings)
    outer = wide.get(2 * size)
    levels = [LevelSpec(name="node", size=size, gb_s=rings[size], latency_us=0.0)]
    if outer:
        levels.append(LevelSpec(name="cluster", gb_s=outer / size))
    hardware = Hardware(
        name="galvatron-profile",
        provenance="a Galvatron profile: measured layers, all-reduces of neighbours; overlap from its coefficient",
        device=replace(
            device, memory_gb_s=FREE_GB_S, memory_efficiency=1.0, launch_us=0.0, dispatch_us=0.0, gemm_efficiency=curve
        ),
        levels=tuple(levels),
        overlap=Overlap(dp=_hidden(files)),
    )
    return hardware, replace(model, kept_mib=_kept_mib(files, model.seq))


def _kept_mib(files: Mapping[str, Json], seq: int) -> float:
    """MiB that a layer keeps for one sequence on one rank, 0 when the profile does not say."""
    for name in sorted(files):
        kept: Json = files[name].get("layertype_0_sp", {}) if name.startswith("memory_profiling_bf16") else {}
        found = kept.get(str(seq), {}).get("tp_activation_per_bsz_dict", {}).get("1")
        if isinstance(found, int | float):
            return float(found)
    return 0.0


def _matches(files: Mapping[str, Json], prefix: str, pattern: re.Pattern[str]) -> dict[tuple[int, ...], float]:
    """Numbers by the integers in their key, of all files whose name begins so."""
    return {
        tuple(int(part) for part in match.groups()): float(value)
        for name in sorted(files)
        if name.startswith(prefix)
        for key, value in files[name].items()
        if (match := pattern.match(key)) and isinstance(value, int | float)
    }


def _hidden(files: Mapping[str, Json]) -> float:
    """Share of gradient exchange that hides: what overlapping does not add to the slower of both."""
    slower = float(files.get("overlap_coefficient.json", {}).get("overlap_coe", 2.0))
    return max(0.0, min(1.0, 2.0 - slower))
