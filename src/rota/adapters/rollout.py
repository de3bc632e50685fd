"""The workload of a rollout role: answers prompts, takes the weights of an edge by name, sleeps and wakes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NotRequired, TypedDict

from rota.job.workload import Workload, op
from rota.spec.dispatch import Each
from rota.spec.errors import BadInput, MissingExtra, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | list[int]
"""A text, which the engine's tokenizer reads, or its tokens."""


class Sampling(TypedDict, total=False):
    """How to answer. ``temperature`` 0 takes the likeliest token each time; ``seed`` makes the draws repeatable."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


DEFAULTS: Sampling = {"n": 1, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0}


class Completion(TypedDict):
    """An answer: its tokens, the log-probability of each, its text where there is a tokenizer.

    ``logprobs`` are natural logarithms of the policy's own probabilities: at temperature 1 and before ``top_p``, also
    where ``sampling`` has others, and the same from every engine.
    """

    tokens: list[int]
    logprobs: list[float]
    text: str


class RolloutItem(TypedDict):
    """What ``generate`` is given: prompts that are answered in the same way; other fields come back as they are."""

    prompts: list[Prompt]
    sampling: NotRequired[Sampling]


class RolloutAnswer(RolloutItem):
    """The item with ``n`` answers to each prompt, and the version of the weights that gave them."""

    completions: list[list[Completion]]
    version: int


class Rollout(Workload):
    """Base of the adapters, which have the four methods below ``wake``; operations are the same for all."""

    version = 0
    asleep = False

    @op.weights
    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take over a committed version, by the names that the model has in transformers."""
        self.wake()
        self.take(tensors)
        self.version = version

    @op(send=Each, retry="safe", progress="10m")
    def generate(self, item: RolloutItem) -> RolloutAnswer:
        """The item with its ``completions``."""
        sampling = item.get("sampling", {})
        if unknown := sorted(sampling.keys() - Sampling.__annotations__.keys()):
            known = [*Sampling.__annotations__]
            raise BadInput(
                f"sampling: unknown {unknown[0]!r}", hint=did_you_mean(unknown[0], known) or ", ".join(known)
            )
        self.wake()
        completions = self.answer(item["prompts"], {**DEFAULTS, **sampling})
        return {**item, "completions": completions, "version": self.version}

    @op(retry="safe")
    def sleep(self) -> None:
        """Give the memory of the device to who shares it; the next call, or new weights, wake the engine."""
        if not self.asleep:
            self.release()
        self.asleep = True

    @op(retry="safe")
    def wake(self) -> None:
        """Take the memory of the device back."""
        if self.asleep:
            self.resume()
        self.asleep = False

    def answer(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """``n`` answers to each prompt."""
        raise NotImplementedError

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these weights into the engine."""
        raise NotImplementedError

    def release(self) -> None:
        """Give up the memory of the device."""
        raise NotImplementedError

    def resume(self) -> None:
        """The engine with its weights, and without what it kept of prompts."""
        raise NotImplementedError


def require(package: str) -> ModuleType:
    """A package that an adapter is for. Raises MissingExtra that says how a job gets it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(
            f"this role needs {package}: {error}", hint=f"in the job file: packages: [{package}]"
        ) from error
