"""The main example without a cluster: its mathematics, its determinism, and what a step that runs again gives."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed"),
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_sums"
MODULES = ("curve", "grpo", "grpo_sums", "learner", "model", "sampling", "sft", "task")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The modules of the example under their own names, taken out of ``sys.modules`` afterwards."""
    torch.set_num_threads(1)
    hidden = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        import curve
        import grpo
        import grpo_sums
        import learner
        import model
        import sampling
        import sft
        import task

        yield SimpleNamespace(
            curve=curve,
            grpo=grpo,
            job=grpo_sums,
            learner=learner,
            model=model,
            sampling=sampling,
            sft=sft,
            task=task,
        )
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def sampled_batch(ex: Any, learner: Any, step: int = 1) -> dict[str, Any]:
    problems = ex.task.problems(0, step, 4)
    indices = [each.index for each in problems]
    groups = ex.sampling.sample_groups(learner.net, 0, step, indices, [each.text for each in problems])
    rewards = np.linspace(0.0, 1.0, len(groups["answers"])).reshape(4, -1)
    logp = learner.logprobs(groups).numpy()
    advantage = ex.grpo.advantages(rewards).reshape(-1)
    return {**groups, "step": step, "advantage": advantage, "old": logp, "base": logp + 0.05}


class Together:
    """A sum over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.given: list[torch.Tensor] = []
        self.lock = threading.Lock()

    def __call__(self, flat: torch.Tensor) -> None:
        with self.lock:
            self.given.append(flat.clone())
        self.barrier.wait(20)
        flat.copy_(torch.stack(self.given).sum(dim=0))
        if self.barrier.wait(20) == 0:
            self.given.clear()
        self.barrier.wait(20)


def shards(batch: dict[str, Any], at: int) -> list[dict[str, Any]]:
    first = {k: v[:at] if isinstance(v, np.ndarray) else v for k, v in batch.items()}
    second = {k: v[at:] if isinstance(v, np.ndarray) else v for k, v in batch.items()}
    return [first, second]


@pytest.mark.parametrize("at", [16, 5])
def test_two_ranks_with_equal_or_unequal_shards_make_the_update_of_one_process(example: Any, at: int) -> None:
    ex, alone = example, example.learner.Learner(3)
    fitting, updating = ex.task.sft_batch(0, 1, 32), sampled_batch(ex, alone)
    wanted = [alone.fit(fitting)]
    gradients = {name: each.grad.clone() for name, each in alone.net.named_parameters() if each.grad is not None}
    wanted.append(alone.update(updating))
    together = Together(2)
    ranks = [ex.learner.Learner(3, together) for _ in range(2)]
    got: dict[int, list[dict[str, float]]] = {}
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def work(rank: int) -> None:
        fit, update = shards(fitting, at)[rank], shards(updating, at)[rank]
        first = ranks[rank].fit(fit)
        named = ranks[rank].net.named_parameters()
        seen[rank] = {name: each.grad.clone() for name, each in named if each.grad is not None}
        got[rank] = [first, ranks[rank].update(update)]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got[0] == got[1]
    for have, want in zip(got[0], wanted, strict=True):
        assert have == pytest.approx(want, rel=1e-3, abs=1e-5)
    for name, value in gradients.items():
        torch.testing.assert_close(seen[0][name], value, atol=1e-6, rtol=1e-4)
    for name, value in ranks[0].net.state_dict().items():
        assert torch.equal(value, ranks[1].net.state_dict()[name]), name


def test_a_restored_learner_goes_on_bit_for_bit_in_both_phases(example: Any) -> None:
    ex, learner = example, example.learner.Learner(1)
    learner.fit(ex.task.sft_batch(0, 1, 16))
    kept = learner.state()
    frozen = {
        "net": {name: value.clone() for name, value in kept["net"].items()},
        "phase": kept["phase"],
        "adam": {i: {name: value.clone() for name, value in each.items()} for i, each in kept["adam"].items()},
    }
    batch = sampled_batch(ex, learner)
    for steps in (
        lambda one: (one.fit(ex.task.sft_batch(0, 2, 16)), one.update(batch)),
        lambda one: one.update(batch),
    ):
        again = ex.learner.Learner(2)
        again.restore(frozen)
        first = ex.learner.Learner(9)
        first.restore(frozen)
        assert steps(first) == steps(again)
        again.restore(first.state())
        assert first.update(batch) == again.update(batch)
        for name, value in first.net.state_dict().items():
            assert torch.equal(again.net.state_dict()[name], value), name


def test_samples_do_not_depend_on_what_else_is_in_the_batch(example: Any) -> None:
    ex, net = example, example.model.GPT(0)
    problems = ex.task.problems(0, 7, 4)
    indices, texts = [each.index for each in problems], [each.text for each in problems]
    whole = ex.sampling.sample_groups(net, 0, 7, indices, texts)["answers"]
    parts = [ex.sampling.sample_groups(net, 0, 7, [i], [t])["answers"] for i, t in zip(indices, texts, strict=True)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert not np.array_equal(whole, ex.sampling.sample_groups(net, 0, 8, indices, texts)["answers"])


def test_cached_sampling_follows_the_distribution_of_the_whole_network(example: Any) -> None:
    ex, net = example, example.model.GPT(5)
    prompts = torch.from_numpy(ex.task.encode_prompts(["1+2="]).repeat(4000, axis=0))
    uniforms = torch.from_numpy(np.random.default_rng(0).random((4000, ex.task.ANSWER_LEN)))
    answers = ex.model.sample(net, prompts, uniforms)
    two = torch.stack([answers[:, 0] * 15 + answers[:, 1]]).flatten()
    seen = torch.bincount(two, minlength=225) / 4000
    first = torch.softmax(net.requires_grad_(False)(prompts[:1])[0, -1], dim=-1)
    for token in (2, 5):
        after = torch.cat([prompts[:1], torch.tensor([[token]])], dim=1)
        second = torch.softmax(net(after)[0, -1], dim=-1)
        wanted = first[token] * second
        assert float((seen[token * 15 : token * 15 + 15] - wanted).abs().max()) < 0.006


def test_the_gradient_of_the_loss_is_that_of_the_paper_at_an_unchanged_policy(example: Any) -> None:
    ex = example
    logp = torch.log(torch.tensor([[0.5, 0.2], [0.3, 0.9]], dtype=torch.float64)).requires_grad_()
    ref = logp.detach() + 0.1
    advantage, mask = torch.tensor([1.5, -2.0], dtype=torch.float64), torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double()
    ex.grpo.policy_loss(logp, logp.detach(), ref, advantage, mask).total.backward()
    kl = ex.grpo.KL_WEIGHT * (1 - np.exp(0.1))
    wanted = [[(-1.5 + kl) / 2, (-1.5 + kl) / 2], [2.0 + kl, 0.0]]
    np.testing.assert_allclose(logp.grad.numpy(), wanted, rtol=1e-9)


def test_the_clip_stops_gains_beyond_its_range_and_never_a_correction(example: Any) -> None:
    ex = example
    old = torch.zeros((4, 1), dtype=torch.float64)
    logp = torch.log(torch.tensor([[1.5], [0.5], [1.5], [0.5]], dtype=torch.float64)).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    loss = ex.grpo.policy_loss(logp, old, logp.detach(), advantage, torch.ones_like(old))
    loss.total.backward()
    np.testing.assert_allclose(logp.grad.flatten().numpy(), [0.0, 0.0, 1.5, -0.5])
    assert float(loss.clipped) == 4


def test_advantages_have_mean_zero_and_a_group_of_equals_has_none(example: Any) -> None:
    found = example.grpo.advantages(np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
    np.testing.assert_allclose(found[0], [1, -1, -1, 1], rtol=1e-3)
    assert not found[1].any()


def test_no_held_out_sum_of_three_is_ever_trained_on_and_steps_repeat_exactly(example: Any) -> None:
    task = example.task
    kept_out = {each.text for each in task.held_out() if len(each.text) == task.PROMPT_LEN}
    drawn = [each for step in range(20) for each in task.problems(0, step, 64)]
    assert len(kept_out) > 100 and not kept_out & {each.text for each in drawn}
    assert task.problems(0, 3, 64) == task.problems(0, 3, 64) != task.problems(1, 3, 64)
    assert all(eval(each.text[:-1]) == int(each.answer) for each in drawn)


def test_the_verifier_pays_for_right_answers_and_reads_rows_problem_by_problem(example: Any) -> None:
    task = example.task
    first, second = task.problems(0, 1, 2)
    rows = task.encode_answers([first.answer, "99", second.answer, second.answer])
    np.testing.assert_allclose(task.score_groups(rows, [first.index, second.index]), [1, 0, 1, 1])


def test_a_rerun_step_leaves_one_row_a_commit_even_after_a_torn_line(example: Any, tmp_path: Path) -> None:
    curve = example.curve.Curve(tmp_path, 0)
    for n in (1, 2, 3):
        curve.add(n, {"loss": float(n)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"n": 4, "lo')
    again = example.curve.Curve(tmp_path, 2)
    again.add(3, {"loss": 33.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"n": 1, "loss": 1.0}, {"n": 2, "loss": 2.0}, {"n": 3, "loss": 33.0}]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("steps", [3, 12])
def test_the_curve_of_a_run_is_drawn_however_short_it_was(example: Any, tmp_path: Path, steps: int) -> None:
    curve = example.curve.Curve(tmp_path, 0)
    for n in range(example.sft.STEPS + 1, example.sft.STEPS + 1 + steps):
        curve.add(n, {"reward": 0.5, "accuracy": 0.25})
    figures = curve.finish(0.75)
    assert (figures["reward_before"], figures["reward_after"], figures["accuracy_after"]) == (0.5, 0.5, 0.75)
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_the_loop_and_the_verifier_load_no_torch() -> None:
    code = "import sys, grpo_sums; grpo_sums.Verifier(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLE, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
