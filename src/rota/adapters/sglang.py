"""Rollout by SGLang: one engine an instance, weights updated by name, memory released while it sleeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rota.adapters import rollout
from rota.adapters.rollout import Completion, Prompt, Sampling, require
from rota.runtime import environ
from rota.spec.codec import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from rota.job.instance.runners import InstanceContext

RAW_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Variable with which log-probabilities are not divided by the temperature. Source: SGLang, srt/layers/sampler.py."""


class Rollout(rollout.Rollout):
    """``model`` and ``engine``: the arguments of ``sglang.Engine``, for example ``{tp_size: 2}``.

    Without the backup in host memory, SGLang has no weights after ``resume``.
    """

    def __init__(self, model: str, engine: JsonObject | None = None) -> None:
        saved: JsonObject = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        self._options: JsonObject = {**saved, **(engine or {}), "model_path": model}

    def setup(self, ctx: InstanceContext) -> None:
        """Start SGLang on the devices of this instance; sampling is seeded with the job's seed."""
        environ.export(RAW_LOGPROBS, "1")  # read when its processes start
        self._engine = require("sglang").Engine(**{"random_seed": ctx.seed, **self._options})

    def answer(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """With the log-probability of each token that was drawn; prompts are all texts or all tokens."""
        if not prompts:
            return []
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        how = {names.get(name, name): value for name, value in sampling.items()}
        given: dict[str, Any] = {"prompt" if isinstance(prompts[0], str) else "input_ids": [*prompts]}
        found = self._engine.generate(**given, sampling_params=how, return_logprob=True)
        n = sampling.get("n", 1)
        return [[_completion(one) for one in found[at : at + n]] for at in range(0, len(found), n)]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """By name; SGLang cuts and joins them as its model needs them, and forgets what it kept of prompts."""
        self._engine.update_weights_from_tensor([*tensors.items()])

    def release(self) -> None:
        """Weights and caches leave the devices."""
        self._engine.release_memory_occupation()

    def resume(self) -> None:
        """Weights and empty caches on the devices."""
        self._engine.resume_memory_occupation()


def _completion(one: Any) -> Completion:
    drawn = one["meta_info"]["output_token_logprobs"]
    return {"tokens": [row[1] for row in drawn], "logprobs": [float(row[0]) for row in drawn], "text": one["text"]}
