"""What a class declares with op is what its interface says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import rota
from rota.job.workload import interface_of, marks_of, op
from rota.service.process.assembly import PRELOAD
from rota.spec.errors import BadInput


class Policy(rota.Workload):
    @rota.op(send=rota.Shard("dp", pad="repeat"), retry="safe")
    def logprobs(self, batch: object) -> object:
        return batch

    @rota.op(send=rota.Shard("dp"), recv=rota.Mean, retry="commit", deadline="10m", progress=5)
    async def update(self, batch: object) -> object:
        return batch

    @rota.op
    def ping(self) -> str:
        return "pong"

    @rota.op.state
    def state(self) -> dict[str, int]:
        return {}

    @rota.op.weights
    def load(self, version: int, tensors: object) -> None: ...


def test_interface_lists_operations_with_their_rules() -> None:
    found = interface_of(Policy)
    update, logprobs, ping = (found.op(name) for name in ("update", "logprobs", "ping"))
    assert update is not None and logprobs is not None and ping is not None
    assert (update.send, update.recv, update.retry) == ("Shard(dp,none)", "Mean", "commit")
    assert (update.deadline_s, update.progress_s, update.is_async) == (600.0, 5, True)
    assert (logprobs.send, logprobs.recv) == ("Shard(dp,repeat)", "Concat(dp)")
    assert (ping.send, ping.recv) == ("Same", "Rank(0)")
    assert (found.has_state, found.loads_weights, found.publishes_weights) == (True, True, False)
    assert marks_of(Policy).state == "state"


def test_an_async_function_is_the_loop_and_a_plain_one_a_function() -> None:
    async def loop(f: object) -> None: ...
    def once(ctx: object) -> None: ...

    assert interface_of(loop).kind == "loop"
    assert interface_of(once).kind == "function"


def test_a_commit_operation_needs_state() -> None:
    class NoState:
        @op(retry="commit")
        def update(self) -> None: ...

    with pytest.raises(BadInput, match=r"NoState\.update has retry='commit' but the class has no @op\.state"):
        interface_of(NoState)


def test_first_is_only_for_safe_operations() -> None:
    with pytest.raises(BadInput, match="retry must be safe, not never"):
        op(recv=rota.First, retry="never")(lambda self: None)


@pytest.mark.parametrize("recv", [rota.First, rota.Rank(0)])
def test_each_item_has_its_answer(recv: object) -> None:
    with pytest.raises(BadInput, match="send=Each answers each item; recv is Concat, Mean, Sum or Stream"):
        op(send=rota.Each, recv=recv)(lambda self, item: None)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_a_rule_without_its_argument_is_meant_or_refused_in_words() -> None:
    class Joins(rota.Workload):
        @op(send=rota.Each, recv=rota.Concat)  # pyright: ignore[reportCallIssue, reportArgumentType] - as people write it
        def work(self, item: object) -> None: ...

    found = interface_of(Joins).op("work")
    assert found is not None and found.recv == "Concat"
    with pytest.raises(ValueError, match="Shard needs its argument"):
        op(send=rota.Shard)(lambda self, item: None)  # pyright: ignore[reportCallIssue, reportArgumentType]


def inspected(folder: Path, workloads: dict[str, str], **args: dict[str, Any]) -> dict[str, Any]:
    """What a child that imports the workloads prints."""
    shown = subprocess.run(
        [sys.executable, "-m", "rota.job.inspect"],
        input=json.dumps({"workdir": str(folder), "workloads": workloads, "args": args}),
        capture_output=True,
        text=True,
        timeout=180,
    )
    return json.loads(shown.stdout)


def test_inspecting_a_file_prints_interfaces_and_errors_as_json(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text("print('noise')\nasync def loop(f): ...\n")
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    submits = "import rota\njob = rota.Job('j')\njob.role('a', 'begins:A')\n"
    submits += "class A(rota.Workload):\n    @rota.op\n    def work(self): ...\n"
    (tmp_path / "begins.py").write_text(submits + "job.plan()\njob.submit()\nraise SystemExit('too far')\n")
    workloads = {"loop": "flow:loop", "bad": "broken:X", "typo": "flow:lop", "own": "begins:A"}
    found = inspected(tmp_path, workloads)
    assert found["loop"]["interface"]["kind"] == "loop"
    assert "No module named 'nowhere_to_be_found'" in found["bad"]["error"]
    assert "broken.py" in found["bad"]["traceback"]
    assert "module 'flow' has no 'lop'" in found["typo"]["error"]
    assert found["own"]["interface"]["kind"] == "class", "it plans and submits no job of its own"


HEAD = "import abc, rota\nfrom rota import Workload, op\n"
OP = "    @op\n    def work(self): ...\n"
MISTAKES = {
    "generator": (
        "class X(Workload):\n    @op\n    def tokens(self, n):\n        yield n\n",
        ["operation 'tokens' is a generator", "return a list", "send=Each, recv=Stream"],
    ),
    "async generator": (
        "class X(Workload):\n    @op\n    async def tokens(self, n):\n        yield n\n",
        ["operation 'tokens' is a generator"],
    ),
    "setup that yields": (
        f"class X(Workload):\n    def setup(self, ctx):\n        yield 1\n{OP}",
        ["X.setup is a generator", "does not run"],
    ),
    "loop that yields": ("async def X(f):\n    yield 1\n", ["function 'X' is a generator"]),
    "constructor": (
        f"class X(Workload):\n    def __init__(self, size, *, lr, seed=0): ...\n{OP}",
        ["X.__init__ needs 'size', 'lr'", "args: {size: ...}, or give it a default"],
    ),
    "abstract": (
        f"class X(Workload, abc.ABC):\n    @abc.abstractmethod\n    def score(self): ...\n{OP}",
        ["X is abstract: it lacks score"],
    ),
    "no operation": (
        "class X(Workload):\n    def setup(self, ctx): ...\n    def score(self, x): ...\n    def _own(self): ...\n",
        ["X has no operation", "mark with @op what other roles call: score"],
    ),
    "no setup": (f"class X:\n{OP}", ["X has no setup(self, ctx)", "class X(Workload)"]),
    "setup without ctx": (
        f"class X(Workload):\n    def setup(self): ...\n{OP}",
        ["X.setup(self) cannot be called as setup(ctx)", "declare it as setup(self, ctx)"],
    ),
    "load without version": (
        f"class X(Workload):\n    @op.weights\n    def load(self, tensors): ...\n{OP}",
        ["X.load(self, tensors) cannot be called as load(version, tensors)"],
    ),
    "loop without flow": ("async def X(): ...\n", ["X() cannot be called as X(f)"]),
    "function of two": ("def X(ctx, size): ...\n", ["X(ctx, size) cannot be called as X(ctx)", "'size'"]),
}


@pytest.fixture(scope="module")
def answers_to_mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What one child says to a module of each mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    for i, text in enumerate(text for text, _ in MISTAKES.values()):
        (folder / f"mine{i}.py").write_text(HEAD + text)
    return inspected(folder, {name: f"mine{i}:X" for i, name in enumerate(MISTAKES)})


@pytest.mark.parametrize("name", MISTAKES)
def test_a_workload_that_cannot_work_is_refused_by_name_when_it_is_inspected(
    name: str, answers_to_mistakes: dict[str, dict[str, str]]
) -> None:
    error = answers_to_mistakes[name].get("error", "")
    assert error.startswith("BadInput: "), answers_to_mistakes[name]
    assert [part for part in MISTAKES[name][1] if part not in error] == [], error


def test_a_reader_of_weights_needs_no_operation_and_defaults_make_a_constructor_without_arguments() -> None:
    class Serves(rota.Workload):
        def __init__(self, size: int = 3, *rest: int, **more: int) -> None: ...

        @op.weights
        def load(self, version: int, tensors: object) -> None: ...

    assert interface_of(Serves).loads_weights


def test_importing_rota_loads_neither_torch_nor_ray() -> None:
    code = "import sys, rota; rota.op, rota.Job, rota.Shard, rota.Res; print({'torch', 'ray'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert shown.stdout.strip() == "set()"


@pytest.mark.slow
def test_what_a_ready_process_has_imported_leaves_the_threads_of_numpy_to_the_job() -> None:
    """NumPy settles them when it is imported, and the share of cores of an instance is set before that."""
    code = f"import importlib, sys; [importlib.import_module(one) for one in {PRELOAD}]; print('numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert shown.stdout.strip() == "False"


def test_dir_lists_what_exists_and_a_wrong_name_is_an_attribute_error() -> None:
    assert {"Workload", "op", "Job", "spmd", "Res", "Fail", "Bound", "Shard", "Each"} <= set(dir(rota))
    with pytest.raises(AttributeError, match="no attribute 'Worklaod'"):
        _ = rota.Worklaod


class Learner(rota.Workload):
    def __init__(
        self,
        lr: float,
        *,
        depth: int | None = None,
        mode: Literal["sgd", "adam"] = "sgd",
        shape: tuple[int, float] = (1, 1.0),
        names: Sequence[str] = (),
        table: dict[str, float] | None = None,
        nested: bool = False,
        other: rota.Workload | None = None,
    ) -> None: ...

    @rota.op
    def work(self) -> None: ...


GOOD: tuple[dict[str, Any], ...] = (
    {"lr": 1},
    {"lr": 1e-4, "depth": None, "mode": "adam", "shape": [2, 0.5], "names": ["a"], "table": {"a": 1}, "nested": True},
    {"lr": 0.5, "other": "anything: no JSON value is one"},
)


@pytest.mark.parametrize("args", GOOD)
def test_arguments_that_fit_the_constructor_are_taken(args: dict[str, Any]) -> None:
    assert interface_of(Learner, args).kind == "class"


@pytest.mark.parametrize(
    ("args", "argument", "said"),
    [
        ({}, "", "Learner.__init__ needs 'lr'"),
        ({"lr": 1.0, "dept": 2}, "dept", "did you mean 'depth'"),
        ({"lr": "1e-4"}, "lr", "lr is '1e-4', and its type is float"),
        ({"lr": True}, "lr", "lr is True, and its type is float"),
        ({"lr": 1.0, "depth": 2.5}, "depth", "its type is int | None"),
        ({"lr": 1.0, "mode": "rms"}, "mode", "mode is 'rms'"),
        ({"lr": 1.0, "shape": [1]}, "shape", "shape is [1]"),
        ({"lr": 1.0, "shape": [1.5, 1.0]}, "shape", "shape is [1.5, 1.0]"),
        ({"lr": 1.0, "names": "abc"}, "names", "names is 'abc'"),
        ({"lr": 1.0, "table": {"a": "b"}}, "table", "table is {'a': 'b'}"),
        ({"lr": 1.0, "nested": 1}, "nested", "nested is 1"),
        ({"lr": "x", "dept": 2, "nested": 1}, "lr dept nested", "has no argument 'dept'; did you mean 'depth'?"),
        ({"dept": 2}, " dept", "needs 'lr'"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_by_name(args: dict[str, Any], argument: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        interface_of(Learner, args)
    assert said in str(caught.value) and " ".join(caught.value.fields["arguments"]) == argument


def test_only_a_constructor_has_arguments_and_one_with_keywords_takes_any() -> None:
    class Free(rota.Workload):
        def __init__(self, **more: object) -> None: ...

        @rota.op
        def work(self) -> None: ...

    assert interface_of(Free, {"anything": [1]}).kind == "class"

    def once() -> None: ...

    with pytest.raises(BadInput, match="once is a function, and args are for the constructor of a class"):
        interface_of(once, {"lr": 1})


def test_an_inspection_names_the_argument_that_is_wrong(tmp_path: Path) -> None:
    text = f"{HEAD}class X(Workload):\n    def __init__(self, lr: float): ...\n{OP}"
    (tmp_path / "learns.py").write_text(text)
    workloads = {"good": "learns:X", "bad": "learns:X", "none": "learns:X"}
    found = inspected(tmp_path, workloads, good={"lr": 1e-4}, bad={"lr": "x"})
    assert found["good"]["interface"]["kind"] == "class"
    assert {key: [*found[key]["arguments"]] for key in ("bad", "none")} == {"bad": ["lr"], "none": [""]}
