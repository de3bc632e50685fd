"""The dashboard and the alert rules ask for metrics that exist, with labels that they have; /metrics is well formed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML
from standing import Standing, with_service

from rota.spec.states import JobState

OPS = Path(__file__).resolve().parents[2] / "docs" / "ops"
METRIC = re.compile(r"\brota_[a-z_]+")


def asked() -> list[str]:
    """Every expression of both files."""
    dashboard = json.loads((OPS / "grafana.json").read_text(encoding="utf-8"))
    rules = YAML(typ="safe").load((OPS / "alerts.yaml").read_text(encoding="utf-8"))
    exprs = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return exprs + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_dashboard_and_rules_ask_for_metrics_that_the_service_gives(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        text = (await service.http.get("/metrics")).text
        named = {name for line in text.splitlines() if line.startswith("# TYPE") for name in [line.split()[2]]}
        series = {f"{name}{tail}" for name in named for tail in ("", "_bucket", "_total", "_count", "_sum")}
        wanted = {name for expr in asked() for name in METRIC.findall(expr)}
        assert len(wanted) >= 15 and wanted <= series, wanted - series

    with_service(tmp_path, test)


def test_the_control_plane_tells_how_it_is(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        found: dict[str, Any] = {}
        for family in text_string_to_metric_families((await service.http.get("/metrics")).text):
            assert family.documentation and family.type != "unknown", family.name
            for sample in family.samples:
                found[f"{sample.name}{sample.labels.get('op', '')}"] = sample.value
        assert found["rota_store_op_seconds_countappend"] >= 3 and found["rota_decision_seconds_count"] >= 1
        assert found["rota_loop_age_seconds"] < 5 and found["rota_store_stale_seconds"] == 0

    with_service(tmp_path, test)
