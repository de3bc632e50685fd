"""Adapters of rollout engines: transformers in a real job, vLLM and SGLang against the calls that they document."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.real.test_cli_real import Installation, installation

from rota.adapters import sglang, transformers, vllm
from rota.adapters.rollout import Rollout
from rota.spec.errors import BadInput, MissingExtra

assert installation  # the fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CODE = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rota import Workload, op

PROMPTS = [[5, 6, 7], [1, 2]]


class Learner(Workload):
    def setup(self, ctx):
        torch.manual_seed(7)
        torch.set_num_threads(1)
        self.net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model")).eval()
        if ctx.restored:
            self.net.load_state_dict(ctx.restored)

    @op(retry="commit")
    def step(self):
        with torch.no_grad():
            for one in self.net.parameters():
                one.add_(torch.randn_like(one) / 4)

    @op
    def likeliest(self, prompt, length):
        tokens = list(prompt)
        with torch.no_grad():
            while len(tokens) < len(prompt) + length:
                tokens.append(int(self.net(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt):]

    @op
    def logprobs(self, prompt, answer):
        with torch.no_grad():
            logits = self.net(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()

    @op.state
    def state(self):
        return self.net.state_dict()

    @op.publish
    def weights(self):
        return dict(self.net.state_dict())


async def loop(f):
    learner, rollout = f.roles.learner, f.roles.rollout
    for n in range(f.committed + 1, 4):
        await learner.step()
        await f.commit(n)
        how = {"temperature": 0, "max_tokens": 5}
        (greedy,) = await rollout.generate([{"prompts": PROMPTS, "sampling": how, "id": n}])
        assert (greedy["version"], greedy["id"]) == (n, n), greedy
        for prompt, (one,) in zip(PROMPTS, greedy["completions"], strict=True):
            assert one["tokens"] == await learner.likeliest(prompt, 5), n
        await rollout.sleep()
        how = {"n": 3, "max_tokens": 4, "seed": 11, "temperature": 1.5, "top_p": 0.9}
        drawn, again = await rollout.generate([{"prompts": PROMPTS, "sampling": how}] * 2)
        assert drawn == again and len({tuple(one["tokens"]) for one in drawn["completions"][0]}) > 1
        for prompt, answers in zip(PROMPTS, drawn["completions"], strict=True):
            for one in answers:
                wanted = await learner.logprobs(prompt, one["tokens"])
                assert max(abs(a - b) for a, b in zip(one["logprobs"], wanted, strict=True)) < 1e-4
    f.log("equal in 3 versions")
"""
JOB = """
name: rollouts
roles:
  learner: {workload: "policy:Learner", resources: {cpus: 0.5}}
  rollout:
    workload: "rota.adapters.transformers:Rollout"
    args: {model: model, pretrained: false}
    resources: {cpus: 0.5}
  loop: {workload: "policy:loop", resources: {cpus: 0.2}, fail: {limit: 0/10m, then: []}}
weights: [{from: learner, to: rollout, every: 1}]
"""


def a_model(folder: Path) -> None:
    """The configuration of a small model."""
    from transformers import GPT2Config

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(folder)


def test_a_rollout_role_answers_with_the_weights_of_each_commit(installation: Installation) -> None:
    a_model(installation.folder / "model")
    (installation.folder / "policy.py").write_text(CODE)
    (installation.folder / "job.yaml").write_text(JOB)
    ran = installation.rota("run", "-w", "job.yaml", "--json")
    assert ran.returncode == 0, json.loads(ran.stdout)["error"]
    assert "equal in 3 versions" in installation.rota("logs", "rollouts-1").stdout


class Recorded:
    """A class of a package that is not installed here: what it was called with."""

    calls: ClassVar[list[tuple[str, Any]]] = []
    answers: ClassVar[list[Any]] = []

    def __init__(self, **options: Any) -> None:
        self.calls.append(("made", options))

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, (*args, kwargs)))
            return self.answers

        return called


TIED = torch.tensor([1.0, 2.5])
WEIGHTS = {"w": torch.ones(2, 2).T, "embed": TIED, "head": TIED}


def used(adapter: Rollout, answers: list[Any]) -> list[tuple[str, Any]]:
    """What the adapter calls for one prompt of tokens, new weights and a sleep."""
    Recorded.calls, Recorded.answers = [], answers  # type: ignore[attr-defined]
    adapter.setup(SimpleNamespace(seed=3))  # type: ignore[arg-type]
    adapter.load(5, WEIGHTS)
    found = adapter.generate({"prompts": [[4, 2]], "sampling": {"n": 2, "max_tokens": 8}})
    assert found["version"] == 5 and [one["logprobs"] for one in found["completions"][0]] == [[-0.5], [-1.5]]
    assert [one["tokens"] for one in found["completions"][0]] == [[7], [9]]
    adapter.sleep()
    adapter.sleep()
    adapter.wake()
    return Recorded.calls


def received(arguments: str) -> dict[str, list[float]]:
    """What a worker of vLLM, in a process of its own, hands to its model."""
    taken: list[tuple[str, torch.Tensor]] = []
    receiver = vllm.WeightReceiver()
    receiver.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: taken.extend(weights)))
    receiver.rota_load(*json.loads(arguments))
    return {name: tensor.tolist() for name, tensor in taken}


class Engine(Recorded):
    """Sends arguments of a call to another process as text, which carries no tensors; it fails if ``broken``."""

    loaded: ClassVar[list[dict[str, list[float]]]] = []
    broken = False

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        self.calls.append((method, ()))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
            self.loaded.append(worker.submit(received, json.dumps(args)).result())
        if self.broken:
            raise RuntimeError("a worker ended")


def test_vllm_is_asked_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(LLM=Engine, SamplingParams=lambda **how: how)
    monkeypatch.setitem(sys.modules, "vllm", module)  # type: ignore[arg-type]
    drawn = [
        SimpleNamespace(token_ids=(token,), logprobs=[{token: SimpleNamespace(logprob=logprob)}], text="")
        for token, logprob in ((7, -0.5), (9, -1.5))
    ]
    calls = used(vllm.Rollout("m", {"tensor_parallel_size": 2}), [SimpleNamespace(outputs=drawn)])
    how = {"n": 2, "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "logprobs": 0}
    receiver = "rota.adapters.vllm.WeightReceiver"
    made = {
        "seed": 3,
        "worker_extension_cls": receiver,
        "enable_sleep_mode": True,
        "logprobs_mode": "raw_logprobs",
        "tensor_parallel_size": 2,
        "model": "m",
    }
    assert calls == [
        ("made", made),
        ("rota_load", ()),
        ("reset_prefix_cache", ({},)),
        ("generate", ([{"prompt_token_ids": [4, 2]}], how, {"use_tqdm": False})),
        ("sleep", ({"level": 1},)),
        ("wake_up", ({},)),
    ]
    assert Engine.loaded == [{"w": [[1.0, 1.0], [1.0, 1.0]], "embed": [1.0, 2.5], "head": [1.0, 2.5]}]


def test_nothing_is_left_of_weights_that_vllm_fails_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(LLM=Engine, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", module)  # type: ignore[arg-type]
    monkeypatch.setattr(Engine, "broken", True)
    adapter = vllm.Rollout("m")
    adapter.setup(SimpleNamespace(seed=3))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a worker ended"):
        adapter.load(5, WEIGHTS)
    files = [one.resolve().name for folder in ("/proc/self/fd", "/dev/shm") for one in Path(folder).iterdir()]
    assert not [name for name in files if "rota-weights" in name]
    assert adapter.version == 0


def test_log_probabilities_of_vllm_that_are_not_raw_are_refused() -> None:
    with pytest.raises(BadInput, match="logprobs_mode 'processed_logprobs': it must be 'raw_logprobs'"):
        vllm.Rollout("m", {"logprobs_mode": "processed_logprobs"})


def test_sglang_is_asked_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Recorded):
        def __init__(self, **options: Any) -> None:
            super().__init__(raw=os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB"), **options)

    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Started))  # type: ignore[arg-type]
    drawn = [{"text": "", "meta_info": {"output_token_logprobs": [(p, t, None)]}} for t, p in ((7, -0.5), (9, -1.5))]
    calls = used(sglang.Rollout("m", {"tp_size": 2}), drawn)
    how = {"n": 2, "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0}
    saved = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    assert calls == [
        ("made", {"raw": "1", "random_seed": 3, **saved, "tp_size": 2, "model_path": "m"}),
        ("update_weights_from_tensor", ([*WEIGHTS.items()], {})),
        ("generate", ({"input_ids": [[4, 2]], "sampling_params": how, "return_logprob": True},)),
        ("release_memory_occupation", ({},)),
        ("resume_memory_occupation", ({},)),
    ]


def test_an_engine_that_is_not_installed_is_named_with_the_line_that_installs_it() -> None:
    with pytest.raises(MissingExtra, match="this role needs vllm") as raised:
        vllm.Rollout("m").setup(SimpleNamespace(seed=0))  # type: ignore[arg-type]
    assert raised.value.hint == "in the job file: packages: [vllm]"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lm_head.bias": torch.ones(2)}, "weights: the model has no lm_head.bias"),
        ({"transformer.ln_f.bias": None}, "weights: what the edge brings has no transformer.ln_f.bias"),
        (
            {"transformer.ln_f.bias": torch.ones(3)},
            "weights: transformer.ln_f.bias has shape [3], that of the model is [16]",
        ),
    ],
)
def test_transformers_keeps_the_old_weights_where_new_ones_do_not_fit(
    tmp_path: Path, change: dict[str, torch.Tensor | None], text: str
) -> None:
    a_model(tmp_path)
    rollout = transformers.Rollout(str(tmp_path), pretrained=False)
    rollout.setup(SimpleNamespace(seed=3))  # type: ignore[arg-type]
    old = {name: tensor.clone() for name, tensor in rollout._net.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in old.items()} | change
    with pytest.raises(BadInput) as raised:
        rollout.load(7, {name: tensor for name, tensor in new.items() if tensor is not None})
    assert raised.value.message == text and rollout.version == 0
    assert all(torch.equal(tensor, old[name]) for name, tensor in rollout._net.state_dict().items())


def test_a_text_without_a_tokenizer_and_an_unknown_way_to_sample_are_refused(tmp_path: Path) -> None:
    a_model(tmp_path)
    rollout = transformers.Rollout(str(tmp_path), pretrained=False)
    rollout.setup(SimpleNamespace(seed=3))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="the model has no tokenizer"):
        rollout.generate({"prompts": ["2 + 2 ="]})
    with pytest.raises(BadInput, match="sampling: unknown 'max_token'") as raised:
        rollout.generate({"prompts": [[1, 2]], "sampling": {"max_token": 2}})  # type: ignore[typeddict-unknown-key]
    assert "max_tokens" in raised.value.hint
