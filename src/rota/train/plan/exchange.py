"""Read the model files of others: native fields, Hugging Face ``config.json``, Calculon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rota.spec import codec
from rota.spec.errors import BadInput
from rota.train.plan.layers import ModelShape
from rota.train.plan.model import refuse_unknown

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
GATED_ACTIVATIONS = ("silu", "swiglu", "geglu")


def model_from_json(raw: Any) -> tuple[ModelShape, tuple[str, ...]]:
    """A model and the warnings about what had to be assumed.

    Raises BadInput that names the field for a form that is not known, a missing or malformed value.
    """
    if not isinstance(raw, Mapping):
        raise BadInput(f"model: expected an object, got {type(raw).__name__}")
    fields: dict[str, Any] = {str(key): value for key, value in raw.items()}  # type: ignore[misc]
    if "num_blocks" in fields or "attn_heads" in fields:
        return _native(*_from_calculon(fields))
    if "hidden_size" in fields or "n_embd" in fields:
        return _native(_from_hugging_face(fields), ())
    return _native(fields, ())


def _from_calculon(fields: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    made = {CALCULON[key]: value for key, value in fields.items() if key in CALCULON}
    warning = f"vocab: Calculon files have none; {CALCULON_VOCAB} is assumed"
    return {**made, "vocab": CALCULON_VOCAB, "attention": "plain"}, (warning,)


def _from_hugging_face(fields: dict[str, Any]) -> dict[str, Any]:
    made = {HUGGING_FACE[key]: value for key, value in fields.items() if key in HUGGING_FACE and value is not None}
    activation = fields.get("hidden_act", fields.get("activation_function", ""))
    return {
        **made,
        "gated": activation in GATED_ACTIVATIONS,
        "tied": bool(fields.get("tie_word_embeddings", True)),
        "name": str(fields.get("_name_or_path") or fields.get("model_type") or ""),
    }


def _native(fields: dict[str, Any], warnings: tuple[str, ...]) -> tuple[ModelShape, tuple[str, ...]]:
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
