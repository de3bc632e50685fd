"""Rollout by vLLM: one engine an instance, weights loaded by name into its workers, sleep mode."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rota.adapters import rollout
from rota.adapters.rollout import Completion, Prompt, Sampling, require
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from rota.job.instance.runners import InstanceContext

LOGPROBS_MODE = "raw_logprobs"
"""Log-probabilities before temperature and ``top_p``. Source: vLLM, vllm/config/model.py, ``logprobs_mode``."""


class Rollout(rollout.Rollout):
    """``model`` and ``engine``: the arguments of ``vllm.LLM``, for example ``{tensor_parallel_size: 2}``.

    Raises BadInput for a ``logprobs_mode`` whose numbers are not those of ``Completion``.
    """

    def __init__(self, model: str, engine: JsonObject | None = None) -> None:
        defaults: JsonObject = {"enable_sleep_mode": True, "logprobs_mode": LOGPROBS_MODE}
        self._options: JsonObject = {**defaults, **(engine or {}), "model": model}
        if (mode := self._options["logprobs_mode"]) != LOGPROBS_MODE:
            hint = "log-probabilities of answers are those of the policy at temperature 1"
            raise BadInput(f"engine.logprobs_mode {mode!r}: it must be {LOGPROBS_MODE!r}, or left out", hint=hint)

    def setup(self, ctx: InstanceContext) -> None:
        """Start vLLM on the devices of this instance; sampling is seeded with the seed of the job."""
        vllm, receiver = require("vllm"), f"{WeightReceiver.__module__}.{WeightReceiver.__qualname__}"
        self._llm = vllm.LLM(**{"seed": ctx.seed, "worker_extension_cls": receiver, **self._options})
        self._params = vllm.SamplingParams

    def answer(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """With the log-probability of each token that was drawn."""
        given = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompts]
        found = self._llm.generate(given, self._params(**sampling, logprobs=0), use_tqdm=False)
        return [[_completion(one) for one in answered.outputs] for answered in found]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Load them by name in every worker, and reset the prefix cache, which was computed with the old weights.

        The engine runs in a process of its own, and arguments of its calls carry no tensors (vLLM, vllm/v1/
        serial_utils.py): they are in a file in shared memory, which goes with its descriptor, also when this is killed.
        """
        with os.fdopen(os.memfd_create("rota-weights", os.MFD_CLOEXEC), "wb") as file:
            require("torch").save(dict(tensors), file)
            file.flush()
            self._llm.collective_rpc("rota_load", args=(f"/proc/{os.getpid()}/fd/{file.fileno()}",))
        self._llm.reset_prefix_cache()

    def release(self) -> None:
        """Weights to the host, caches gone."""
        self._llm.sleep(level=1)

    def resume(self) -> None:
        """Weights and empty caches on the devices."""
        self._llm.wake_up()


class WeightReceiver:
    """Extension of vLLM's worker. Source: vLLM, docs, "RLHF": worker_extension_cls and collective_rpc."""

    model_runner: Any

    def rota_load(self, path: str) -> None:
        """A file of tensors by their names in transformers; vLLM cuts and joins them as its model needs them."""
        tensors = require("torch").load(path, map_location="cpu", mmap=True, weights_only=True)
        self.model_runner.model.load_weights(weights=[*tensors.items()])


def _completion(one: Any) -> Completion:
    logprobs = [float(each[token].logprob) for token, each in zip(one.token_ids, one.logprobs, strict=True)]
    return {"tokens": list(one.token_ids), "logprobs": logprobs, "text": one.text}
