"""Model files of others become the same model; mistakes name their field."""

from __future__ import annotations

import pytest

from rota.spec.errors import BadInput
from rota.train.plan.importers import model_from_json
from rota.train.plan.model import embed_params, head_params, layer_params

NATIVE = {"layers": 32, "hidden": 4096, "heads": 32, "seq": 4096, "vocab": 32000, "ffn": 11008, "gated": True}


def test_the_three_forms_give_the_same_model() -> None:
    native, _ = model_from_json({**NATIVE, "tied": False})
    hugging_face, _ = model_from_json(
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_theta": 10000,
        }
    )
    for params in (embed_params, layer_params, head_params):
        assert params(native) == params(hugging_face)
    assert (native.layers, native.tied) == (hugging_face.layers, hugging_face.tied)
    assert (native.inner, native.seq, native.gated) == (hugging_face.inner, hugging_face.seq, hugging_face.gated)
    calculon, warnings = model_from_json(
        {"hidden": 12288, "feedforward": 49152, "seq_size": 2048, "attn_heads": 96, "attn_size": 128, "num_blocks": 96}
    )
    assert (calculon.layers, calculon.heads, calculon.inner, calculon.vocab) == (96, 96, 49152, 51200)
    assert "51200" in warnings[0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"layer": 3}, "model.layer: unknown field"),
        ({"layers": 0}, "model.layers: 0"),
        ({"heads": 33}, "hidden 4096 does not divide"),
        ({"kv_heads": 5}, "heads 32 does not divide"),
        ({"hidden": "4096"}, "expected int"),
        ({"attention": "linear"}, "linear"),
    ],
)
def test_a_mistake_names_its_field(edit: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        model_from_json({**NATIVE, **edit})


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(BadInput, match="expected an object"):
        model_from_json([1])
    with pytest.raises(BadInput, match=r"model\.layers: missing"):
        model_from_json({"hidden": 3})
