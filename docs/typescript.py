"""The documents of the REST API as TypeScript, for the web UI: ``web/src/api/types.ts``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rota.service.rest.app import application

HEAD = "/** Documents of the REST API that the UI reads. Written by docs/generate.py from the OpenAPI document. */\n"
PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}
IMPORTED = re.compile(r'import type \{([^}]*)\} from "[./a-z]*/types"')


def types_of(sources: Path) -> str:
    """An interface or alias for each document that the ``sources`` import, and for what it is made of."""
    schemas: Mapping[str, Any] = application().openapi()["components"]["schemas"]
    texts = {name: _declaration(name, schema) for name, schema in schemas.items()}
    wanted = sorted(set(_imported(sources)))
    found: dict[str, str] = {}
    while wanted:
        name = wanted.pop(0)
        if name not in found:
            found[name] = texts[name]
            wanted += [one for one in schemas if re.search(rf"\b{one}\b", texts[name])]
    return HEAD + "".join(f"\n{found[name]}" for name in sorted(found))


def _imported(sources: Path) -> Iterator[str]:
    for path in sorted(sources.rglob("*.ts*")):
        for names in IMPORTED.findall(path.read_text(encoding="utf-8")):
            yield from (one.split(" as ")[0].strip() for one in names.split(",") if one.strip())


def _declaration(name: str, schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        return f"export type {name} = {_type(schema)};\n"
    text = " ".join(schema.get("description", "").replace("``", "`").split())
    lines = [f"/** {text} */"] if text else []
    required = schema.get("required", ())
    fields = [
        f"  {field}{'' if field in required else '?'}: {_type(one)};" for field, one in schema["properties"].items()
    ]
    others = ["  [field: string]: unknown;"] if schema.get("additionalProperties") is True else []
    return "\n".join([*lines, f"export interface {name} {{", *fields, *others, "}", ""])


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema or "enum" in schema:
        return " | ".join(f'"{one}"' for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    if schema.get("type") == "array":
        inner = _type(schema["items"])
        return f"({inner})[]" if " " in inner else f"{inner}[]"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {_type(values) if isinstance(values, dict) and values else 'unknown'}>"
    return PLAIN.get(schema.get("type", ""), "unknown")
