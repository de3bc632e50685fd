"""rota plan from the outside: documents, exit statuses, mistakes by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rota.runtime.environ import Home
from rota.service import plans
from rota.service.cli.app import call
from rota.service.control.plan_hardware import PlannedDevices
from rota.spec import codec
from rota.train.plan.hardware import A100_80G_DGX

MODEL = {"layers": 8, "hidden": 2048, "heads": 16, "seq": 2048, "vocab": 32000, "tied": False}
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return path


def search_words(model: Path, *, gpus: int = 4, memory: float = 20, batch: int = 8) -> list[str]:
    words = ["plan", "search", "--model", str(model), "--gpus", str(gpus), "--memory", str(memory)]
    return [*words, "--batch", str(batch), "--json"]


@pytest.mark.slow
def test_a_search_prints_one_document_and_show_and_explain_read_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(search_words(model)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "PlanSearch"
    assert found["certificate"]["gap_pct"] == 0.0
    assert found["predicted"]["memory_gib"] <= 18
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found))

    assert call(["plan", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found["plan"]

    assert call(["plan", "explain", str(path), "--why-not", "pp=4", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert sum(explained["breakdown_s"].values()) == pytest.approx(found["predicted"]["iteration_s"])
    assert explained["why_not"]["degrees"] == {"pp": 4}
    assert explained["why_not"]["verdict"] == "slower"
    assert explained["why_not"]["iteration_s"] > found["predicted"]["iteration_s"]


def test_an_explanation_keeps_the_pins_of_the_search_and_repeats_its_question(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([*search_words(model), "--pin", "pp=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    (tmp_path / "found.json").write_text(json.dumps(found))
    assert call(["plan", "explain", str(tmp_path / "found.json"), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["certificate"] == found["certificate"]
    assert all(one["slower_pct"] >= 0 for one in explained["runner_ups"])
    assert call(["plan", "explain", str(tmp_path / "found.json"), "--why-not", "pp=1,tp=2"]) == 0
    assert "why not pp=1, tp=2: faster: " in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "param"), [(None, "bf16"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_a_search_plans_in_the_number_format_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str | None, param: str
) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({**MODEL, "layers": 2} | ({"dtype": dtype} if dtype else {})))
    assert call([*search_words(model, gpus=1, memory=40, batch=1), "--top", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["dtype"] == {"param": param, "reduce": "fp32", "master": "fp32"}


def test_a_device_without_a_peak_for_the_number_format_of_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, hardware = tmp_path / "model.json", tmp_path / "hardware.json"
    model.write_text(json.dumps({**MODEL, "dtype": "fp32"}))
    described = codec.to_json_value(A100_80G_DGX)
    described["device"]["peak_tflops"] = {"bf16": 300.0}
    hardware.write_text(json.dumps(described))
    assert call([*search_words(model), "--hardware", str(hardware)]) == 2
    assert "hardware.device.peak_tflops: has no fp32, in which the model is trained" in capsys.readouterr().err


def test_a_hardware_that_is_named_by_its_type_is_answered_with_the_shipped_name(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("H100", "did you mean 'h100-96g'?"), ("abacus", "shipped: a100-80g-dgx, ")):
        assert call([*search_words(model), "--hardware", name]) == 2
        assert said in capsys.readouterr().err


def test_offload_that_nobody_asked_for_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = search_words(model, gpus=1, memory=10)
    assert call(words) == 0
    found = json.loads(capsys.readouterr().out)
    kind = found["plan"]["layers"][0]["offload"]
    assert kind != "none"
    assert found["notes"] == [f"nothing fits without offload, so this plan has offload {kind}"]
    assert call(words[:-1]) == 0
    assert found["notes"][0] in capsys.readouterr().out.splitlines()
    assert call([*words, "--allow", "offload"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_plans_that_were_found_are_told_apart_by_what_they_choose(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([word for word in search_words(model) if word != "--json"]) == 0
    first, head, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "plan: sync allreduce"
    columns = head.partition("step s")[0].split()
    choices = [tuple(row.split()[: len(columns)]) for row in rows[:5]]
    assert {"dp_shard", "tp", "zero"} <= {*columns} and len({*choices}) == 5, choices
    assert all(len({*each}) > 1 for each in zip(*choices, strict=True)), "a column in which none differs says nothing"


def test_nothing_fits_is_exit_4_with_what_would_help(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(search_words(model, gpus=1, memory=4)) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["plan"], document["reason"]) == (None, "out_of_memory")
    assert document["closest"]["needs_gib"] > 2
    assert document["smallest_gpus"] >= 2


@pytest.mark.parametrize(
    ("batch", "pin", "cause", "helps"),
    [
        (7, "dp=4", "batch 7 is not divisible by dp 4", ["batch 8", "batch 4", "dp not pinned"]),
        (8, "dp=3", "no plan takes 8 sequences on 4 devices with dp=3", ["dp not pinned"]),
        (8, "tp=3", "no plan takes 8 sequences on 4 devices with tp=3", ["tp not pinned"]),
        (8, "tp=3,dp=8", "no plan takes 8 sequences on 4 devices with tp=3,dp=8", ["other pins or devices"]),
    ],
)
def test_what_no_memory_would_mend_is_not_told_as_memory(
    model: Path, capsys: pytest.CaptureFixture[str], batch: int, pin: str, cause: str, helps: list[str]
) -> None:
    words = [*search_words(model, memory=60, batch=batch), "--pin", pin]
    assert call(words) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["reason"], document["cause"], document["helps"]) == ("no_setting", cause, helps)
    assert call([word for word in words if word != "--json"]) == 4
    assert capsys.readouterr().out == f"{cause}\nwhat would help: {', '.join(helps)}\n"


def test_a_search_that_ran_out_of_time_does_not_say_that_nothing_fits(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*search_words(model), "--limit-s", "1e-9"]
    assert call(words) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["plan"], document["reason"], "helps" in document) == (None, "timed_out", False)
    assert call(words[:-3] + words[-2:]) == 4
    assert "no plan was found in time" in capsys.readouterr().out


def test_a_table_is_validated(capsys: pytest.CaptureFixture[str]) -> None:
    tables = str(DATA / "planner_time_tables.json")
    assert call(["plan", "validate", tables, "--table", "megatron_seqpar_table5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mean_pct"] < 5
    assert len(document["rows"]) == 6


def test_validate_without_the_proof_folder_exits_with_2_and_names_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plans, "CHECKOUT", tmp_path)
    tables = str(DATA / "planner_time_tables.json")
    assert call(["plan", "validate", tables, "--table", "megatron_seqpar_table5", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["code"]) == ("Error", "MISSING_EXTRA")
    assert f"readers of published tables are not part of an installed package: {tmp_path}" in document["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1:2:"),
        ('{"layers": 8}', "model.hidden: missing"),
        ('{"layers": 8, "hiden": 3}', "did you mean 'hidden'"),
        ("[]", "expected an object"),
    ],
)
def test_a_bad_model_file_is_exit_2_with_its_place(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    assert call(search_words(path)[:-1]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err


def test_a_missing_file_an_unknown_table_and_unknown_hardware_are_exit_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(search_words(tmp_path / "none.json")) == 2
    assert call(["plan", "validate", str(DATA / "planner_time_tables.json"), "--table", "x"]) == 2
    assert call([*search_words(model), "--hardware", "abacus"]) == 2


@pytest.mark.parametrize("name", ["a100-80g-dgx", "h100-96g", "h200-141g", "cpu-local"])
def test_each_shipped_hardware_is_searched(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*search_words(model, gpus=2), "--hardware", name]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["question"]["hardware"]["name"] == name
    assert found["predicted"]["iteration_s"] > 0


@pytest.mark.parametrize("memory", ["nan", "inf", "-1", "2"])
def test_memory_that_is_no_size_is_exit_2(memory: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(search_words(model, memory=float(memory))) == 2
    assert "memory: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_calibration_is_a_hardware_file_that_the_search_reads(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "here.json"
    assert call(["plan", "calibrate", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hardware"]["device"]["memory_gb_s"] > 0.1
    assert all(0 < one["low"] <= one["value"] <= one["high"] for one in document["measured"])
    assert call([*search_words(model, gpus=1, memory=40), "--hardware", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["iteration_s"] > 0


@pytest.mark.slow
def test_a_calibration_without_a_file_is_what_the_installation_plans_that_type_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("ROTA_HOME", str(tmp_path))
    assert call(["plan", "calibrate", "--type", "NVIDIA Quick-9", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["file"] == str(tmp_path / "hardware" / "nvidia-quick-9.json")
    found = PlannedDevices.of([], Home.find().hardware).described("NVIDIA Quick-9", 0)
    assert found is not None
    assert found.device.memory_gb_s == measured["hardware"]["device"]["memory_gb_s"]


@pytest.mark.slow
def test_each_number_format_of_a_device_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in bf16 is not priced with products in fp32: a device may be ten times as fast. Here on cores."""
    pytest.importorskip("torch")
    from rota.train import local_hardware

    monkeypatch.setitem(local_hardware.SIDES, "cpu", (16, 64))
    monkeypatch.setitem(local_hardware.FORMATS, "cpu", ("bf16", "fp32"))
    found, figures = local_hardware.measure()
    values = {one.name: one.value for one in figures}
    for name in ("bf16", "fp32"):
        peak = max(values[f"{name} product of {side} (TFLOP/s)"] for side in (16, 64))
        assert found.device.peak_tflops[name] == peak
    assert max(share for _, share in found.device.gemm_efficiency) == 1
    assert found.device.peak_tflops["fp16"] == found.device.peak_tflops["fp32"], "what was not measured"


def test_a_device_type_that_is_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROTA_HOME", str(tmp_path))
    assert call(["plan", "calibrate", "--type", "../x"]) == 2
    assert "--type: '../x' is not a device type" in capsys.readouterr().err


def test_a_calibration_without_ranks_or_with_nowhere_to_write_is_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["plan", "calibrate", str(tmp_path / "x.json"), "--ranks", "0"]) == 2
    assert "--ranks: 0 is below 1" in capsys.readouterr().err
