"""JobSpec back to the text of a job file, YAML or JSON; reading it again gives the same value."""

from __future__ import annotations

import io
import json
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from rota.spec.job import JobSpec


def job_text(spec: JobSpec, form: Literal["yaml", "json"] = "yaml") -> str:
    """The job file of ``spec``. Fields at their default and what inspecting a workload found are left out."""
    fields = job_fields(spec)
    if form == "json":
        return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return yaml_text(fields)


def yaml_text(value: Any) -> str:
    """Plain values as YAML, in their order."""
    out = io.StringIO()
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 120
    yaml.dump(_quoted(value), out)
    return out.getvalue()


def job_fields(spec: JobSpec) -> dict[str, Any]:
    """The fields of the job file as plain values."""
    from rota.service.jobfile.models import JobPart  # noqa: PLC0415 - YAML of other values needs no pydantic

    return JobPart.of(spec).model_dump(mode="json", by_alias=True, exclude_unset=True)


def _quoted(value: Any) -> Any:
    """Plain values with every text that YAML could read as something else in quotes."""
    if isinstance(value, dict):
        return {_quoted(key): _quoted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, str) and not (value.replace("_", "").isalnum() and value[0].isalpha() and value.isascii()):
        return DoubleQuotedScalarString(value)
    return value
