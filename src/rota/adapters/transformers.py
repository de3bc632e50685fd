"""Rollout by a causal model of transformers: a plain engine for CPUs and tests, with the interface of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rota.adapters import rollout
from rota.adapters.rollout import Completion, Prompt, Sampling, require
from rota.runtime.node import accelerator
from rota.spec.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from rota.job.instance.runners import InstanceContext


class Rollout(rollout.Rollout):
    """``model``: a folder or name that transformers knows; ``pretrained: false`` takes its configuration alone."""

    def __init__(self, model: str, pretrained: bool = True) -> None:
        self._model, self._pretrained = model, pretrained

    def setup(self, ctx: InstanceContext) -> None:
        """Make the model, on the device of this instance if it has one."""
        auto, model = require("transformers"), self._model
        self._torch, self._place = require("torch"), accelerator()
        self._torch.manual_seed(ctx.seed)
        made, config = auto.AutoModelForCausalLM, auto.AutoConfig.from_pretrained(model)
        net = made.from_pretrained(model) if self._pretrained else made.from_config(config)
        self._net, ends = net.to(self._place).eval(), net.generation_config.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        try:
            self._tokenizer: Any = auto.AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError):  # prompts are tokens then
            self._tokenizer = None

    def answer(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """One prompt after the other. Raises BadInput for a text where the model has no tokenizer."""
        if (seed := sampling.get("seed")) is not None:
            self._torch.manual_seed(seed)
        return [self._answers(self._tokens(prompt), sampling) for prompt in prompts]

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        tokens: list[int] = self._tokenizer(prompt)["input_ids"] if self._tokenizer else []
        if not tokens:
            raise BadInput(f"prompt {prompt!r}: the model has no tokenizer", hint="give tokens: [17, 4, 9]")
        return tokens

    def _answers(self, tokens: list[int], sampling: Sampling) -> list[Completion]:
        drawn = sampling.get("temperature", 1.0) > 0
        how = {"temperature": sampling.get("temperature"), "top_p": sampling.get("top_p"), "top_k": 0} if drawn else {}
        given = self._torch.tensor([tokens] * sampling.get("n", 1), device=self._place)
        with self._torch.no_grad():
            found = self._net.generate(
                given,
                attention_mask=self._torch.ones_like(given),
                max_new_tokens=sampling.get("max_tokens"),
                do_sample=drawn,
                pad_token_id=next(iter(self._ends), 0),
                return_dict_in_generate=True,
                output_logits=True,
                **how,
            )
        new = found.sequences[:, len(tokens) :]
        policy = self._torch.stack(found.logits, 1).float().log_softmax(-1)
        logprobs = policy.gather(-1, new.unsqueeze(-1)).squeeze(-1)
        return [self._completion(row.tolist(), logp.tolist()) for row, logp in zip(new, logprobs, strict=True)]

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        length = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        text = self._tokenizer.decode(tokens[:length], skip_special_tokens=True) if self._tokenizer else ""
        return {"tokens": tokens[:length], "logprobs": logprobs[:length], "text": text}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises BadInput, with the old weights in place, for names or shapes that are not those of the model."""
        wanted: Mapping[str, Tensor] = self._net.state_dict()
        tied = self._net.all_tied_weights_keys
        wrong = [f"the model has no {name}" for name in tensors if name not in wanted]
        for name, own in wanted.items():
            if name not in tensors:
                wrong += [] if name in tied else [f"what the edge brings has no {name}"]
            elif tensors[name].shape != own.shape:
                wrong.append(f"{name} has shape {[*tensors[name].shape]}, that of the model is {[*own.shape]}")
        if wrong:
            hint = "publish the state_dict of the model by its names in transformers"
            raise BadInput(f"weights: {wrong[0]}", hint=hint)
        self._net.load_state_dict(tensors, strict=False)

    def release(self) -> None:
        """Keep the weights in host memory."""
        self._net.to("cpu")

    def resume(self) -> None:
        """Bring them back to the device."""
        self._net.to(self._place)
