"""Answers of a network: sampled groups for a training step, greedy ones to measure accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import grpo
import numpy as np
import task
import torch
from model import GPT, sample


def sample_groups(
    net: GPT, seed: int, step: int, indices: Sequence[int], texts: Sequence[str]
) -> dict[str, task.Tokens]:
    """`prompts` [B, P] and `answers` [B, T], B = GROUP rows a problem, problem by problem."""
    prompts = np.repeat(task.encode_prompts(texts), grpo.GROUP, axis=0)
    draws = [task.uniforms(seed, step, index, (grpo.GROUP, task.ANSWER_LEN)) for index in indices]
    answers = sample(net, torch.from_numpy(prompts), torch.from_numpy(np.concatenate(draws)))
    return {"prompts": prompts, "answers": answers.numpy()}


def greedy_answers(net: GPT, texts: Sequence[str]) -> list[str]:
    """The most likely answer to each text."""
    return task.decode_answers(sample(net, torch.from_numpy(task.encode_prompts(texts)), None).numpy())
