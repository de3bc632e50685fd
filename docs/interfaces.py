"""Pages of the reference that the interfaces describe themselves: command line, job file, exit statuses."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rota.service.cli.app import FAMILIES, GROUPS, VERBS, verb_function
from rota.service.cli.flags import Flags
from rota.service.config import Settings
from rota.service.jobfile.models import JobPart, json_schema
from rota.service.jobfile.scripts import SBATCH, SHORT
from rota.service.jobfile.validation import Kind, Part, Several, part_in
from rota.service.metrics import Counts, Metrics
from rota.service.rest.app import application
from rota.service.views.installation import Installation
from rota.spec.errors import RotaError
from rota.spec.reasons import ENDED_ITSELF
from rota.testing.memory import VirtualClock

SOURCES = Path(inspect.getfile(RotaError)).parent.parent

EXITS = (
    (0, "Done; the job, if one was waited for, succeeded."),
    (1, "The job or a check failed, or an internal error: its text names the log."),
    (2, "Bad input or usage: an invalid file, an unknown name, not allowed, the wrong state for it."),
    (3, "The service, or a store behind it, cannot be reached."),
    (4, "Nothing fits: no set of nodes could hold it, or no plan."),
    (5, "A limit of time ran out; what was asked may still happen."),
    (125, "`rota exec` itself failed; else it has the status of the command."),
    (130, "Ctrl-C; a job that was followed continues."),
)


def page_of_commands() -> str:
    """docs/reference/cli.md: every verb with its arguments, flags and examples."""
    lines = [
        "# Command line",
        "",
        "`rota VERB ...`. With `--json` stdout is exactly one document, or one a line when following; progress and",
        "mistakes are on stderr. Without a terminal there is no colour, no question and no following.",
        "JOB is an id or a unique prefix of one. What follows `--` in `rota run` and `rota exec` is a command,",
        "word by word.",
        "",
        "Flags of every verb:",
        "",
        *_flag_table(Flags),
    ]
    for group in GROUPS:
        lines += ["", f"## {group}"]
        shown: set[str] = set()
        for verb, (owner, _, _) in VERBS.items():
            if owner != group:
                continue
            family = verb.rpartition(" ")[0]
            if family and family not in shown:
                shown.add(family)
                lines += ["", f"### rota {family}", "", FAMILIES[family]]
            lines += _verb(verb)
    return "\n".join([*lines, ""])


def _verb(verb: str) -> list[str]:
    function = verb_function(verb)
    about, _, examples = (inspect.getdoc(function) or "").partition("Examples\n--------\n")
    words = " ".join(name.upper() for name, _ in _arguments(function))
    lines = ["", f"### rota {verb} {words}".rstrip(), "", about.strip(), ""]
    rows = list(_arguments(function))
    lines += [f"- `{name.upper()}`: {text}" for name, text in rows] + ([""] if rows else [])
    table = _flag_table(function)
    return [*lines, *(table if len(table) > 2 else []), "", "```", *filter(None, examples.splitlines()), "```"]


def _hints(function: Any) -> Mapping[str, Any]:
    return get_type_hints(function, include_extras=True)


def _extra(hint: Any) -> Any:
    """The ``Parameter`` of an annotation or of a part of it (``TRACE | None``), or None."""
    annotated = [one for one in (hint, *get_args(hint)) if get_origin(one) is Annotated]
    return next((extra for one in annotated for extra in get_args(one)[1:] if hasattr(extra, "help")), None)


def _arguments(function: Callable[..., int]) -> Iterator[tuple[str, str]]:
    hints = _hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            extra = _extra(hints[name])
            dots = "..." if parameter.kind is inspect.Parameter.VAR_POSITIONAL else ""
            yield f"{name.rstrip('_')}{dots}", str(extra.help) if extra else ""


def _flag_table(function: Any) -> list[str]:
    return ["| flag | meaning | default |", "|---|---|---|", *_flag_rows(function)]


def _flag_rows(function: Any) -> Iterator[str]:
    hints = _hints(function.__init__ if isinstance(function, type) else function)
    for name, parameter in inspect.signature(function).parameters.items():
        extra = _extra(hints[name])
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or name == "flags":
            continue
        if extra is not None and extra.show is False:
            continue
        if is_dataclass(hints[name]):  # flags that belong together
            yield from _flag_rows(hints[name])
            continue
        given = extra.name if extra is not None and extra.name else f"--{name.replace('_', '-')}"
        names = ", ".join(f"`{one}`" for one in ([given] if isinstance(given, str) else given))
        default = "required" if parameter.default is parameter.empty else ""
        default = default or ("" if parameter.default in (None, False, "") else f"`{parameter.default}`")
        text = str(extra.help if extra else "").replace("|", "\\|")
        yield f"| {names} | {text} | {default} |"


def page_of_job_file() -> str:
    """docs/reference/job-file.md: every field with its kind, default and meaning."""
    lines = [
        "# Job file",
        "",
        "YAML 1.2 or JSON, UTF-8, at most 1 MiB, one job a file. Unknown fields are errors. Durations need a unit",
        "(`90s 5m 8h 2d`), sizes too (`64GiB 512MB`). Only `true` and `false` are booleans. `rota run FILE --check`",
        "reports every mistake of the file at its line and column, those of the workloads too, which it imports.",
        "Its secrets and the jobs of `after` are looked up by `--dry-run` and at submit.",
        "`--set path=value` changes a field, for example `--set roles.trainer.replicas=4`.",
    ]
    for path, part in _parts("", JobPart):
        lines += ["", f"## {path or 'Job'}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        for name, (attribute, field) in part.by_name().items():
            words = _kind_words(field.annotation, field.metadata)
            lines.append(f"| `{name}` | {words} | {_default(part, attribute)} | {field.description} |")
    lines += [
        "",
        "## The older form",
        "",
        "`{jobName, image, dataDir, outputDir, taskRoles: [{name, taskNumber, cpuNumber, memoryMB, gpuNumber,",
        "command}]}` is converted key by key: `jobName` to `name`, `dataDir` to `data`, `outputDir` to `output`; each",
        "entry becomes a role `name` or `task<n>`, `taskNumber` its `replicas`, `cpuNumber` its `cpus`, `memoryMB` its",
        "`memory` in MiB, `gpuNumber` its `gpus`, `command` its `run`. `//` comments are tolerated in JSON.",
    ]
    lines += [
        "",
        "## Scripts",
        "",
        "`rota run train.sh` (also `.sbatch`, `.slurm`) makes a job of one role from the head of the script: lines",
        f"`#ROTA key=value`, where key is {', '.join(f'`{name}`' for name in SHORT)} or any path as in `--set`, and",
        "these options of `#SBATCH`; others are refused with what takes their place. Every task runs the whole script.",
        "",
        *(f"- `--{name}`" for name in SBATCH),
    ]
    return "\n".join([*lines, ""])


def _parts(path: str, part: type[Part]) -> Iterator[tuple[str, type[Part]]]:
    """The mappings below a mapping, each with the path that leads to it."""
    yield path, part
    for name, (_, field) in part.by_name().items():
        below = part_in(field)
        many = {dict: ".NAME", tuple: "[]"}.get(get_origin(field.annotation) or object, "")
        if below is not None:
            yield from _parts(f"{path}.{name}{many}" if path else f"{name}{many}", below)


def _kind_words(annotation: Any, metadata: Sequence[Any]) -> str:
    """The type of a field as people read it."""
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
    named = next((one.words for one in metadata if hasattr(one, "words")), None)
    if named is not None:
        return named
    if get_origin(annotation) is dict:
        return f"map of name to {_kind_words(get_args(annotation)[1], ())}"
    if get_origin(annotation) is tuple:
        bars = any(isinstance(one, Several) and one.bars for one in metadata)
        return f"list of {_kind_words(get_args(annotation)[0], ())}" + (", or `a\\|b`" if bars else "")
    return annotation.words


def _default(part: type[Part], name: str) -> str:
    """What holds when a field is left out."""
    field = part.model_fields[name]
    shown = str(field.json_schema_extra.get("x-default", "")) if isinstance(field.json_schema_extra, dict) else ""
    value = part.defaults().get(name)
    if field.is_required() or shown or value is None:
        return "required" if field.is_required() else shown
    if isinstance(value, bool | tuple):
        return "\\|".join(value) if isinstance(value, tuple) else str(value).lower()
    kind = next((one for one in field.metadata if isinstance(one, Kind)), None)
    return str(value if kind is None else kind.write(value)) if not is_dataclass(value) else ""


def page_of_exits() -> str:
    """docs/reference/exit-codes.md: what a script may rely on."""
    lines = ["# Exit statuses", "", "| status | meaning | errors |", "|---|---|---|"]
    by_exit: dict[int, list[str]] = {}
    for cls in _classes(RotaError):
        by_exit.setdefault(cls.exit, []).append(f"`{cls.code}`")
    for status, text in EXITS:
        lines.append(f"| {status} | {text} | {', '.join(sorted(set(by_exit.get(status, []))))} |")
    lines += ["", "Of a process of a job that ended itself so that another takes its place (`SELF_ENDED`):", ""]
    lines += ["| status | meaning |", "|---|---|", *(f"| {code} | {why} |" for code, why in ENDED_ITSELF.items())]
    return "\n".join([*lines, ""])


def _classes(root: type[RotaError]) -> Iterator[type[RotaError]]:
    """The tree as ``spec/errors.py`` draws it; leaves of other packages come and go with their imports."""
    yield root
    for cls in root.__subclasses__():
        if cls.__module__ == RotaError.__module__:
            yield from _classes(cls)


def page_of_settings() -> str:
    """docs/reference/settings.md: every setting with its variable, default and meaning."""
    lines = [
        "# Settings",
        "",
        "A flag of `rota up` wins over the variable, the variable over `config.toml` in the home folder",
        "(`name = value`, one a line), that over the default. `rota status --settings` shows every value and where it",
        "came from.",
        "",
        "| setting | variable | default | meaning |",
        "|---|---|---|---|",
    ]
    hints = get_type_hints(Settings, include_extras=True)
    for one in fields(Settings):
        if get_origin(hints[one.name]) is Annotated:
            default = f"`{one.default}`" if one.default not in ("", MISSING) else ""
            lines.append(f"| `{one.name}` | `ROTA_{one.name.upper()}` | {default} | {get_args(hints[one.name])[1]} |")
    lines += [
        "",
        "Variables of a machine, for the service and for `rota join`:",
        "",
        "| variable | meaning |",
        "|---|---|",
        *_variables_of_machines(),
        "",
        "A process that shares tensors has [variables of its own](../explanation/tensor-leases.md#variables).",
        "",
    ]
    return "\n".join(lines)


def _variables_of_machines() -> Iterator[str]:
    """A row for each constant whose docstring says that it is one."""
    mark = re.compile(r'^\w+(?:: Final)? = "(ROTA_\w+)"\n"""Variable of a machine: (.+)"""$', re.MULTILINE)
    for path in sorted(SOURCES.rglob("*.py")):
        for name, meaning in mark.findall(path.read_text(encoding="utf-8")):
            yield f"| `{name}` | {meaning[0].upper()}{meaning[1:].replace('``', '`')} |"


def page_of_metrics() -> str:
    """docs/reference/metrics.md: every family that ``/metrics`` exposes, with its labels."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` in Prometheus' text format. They are computed from the event log, so a restart loses none.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for family in Metrics(Installation(), Counts(), clock=VirtualClock(), version="").families():
        total = "_total" if family.type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        lines.append(f"| `{family.name}{total}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join([*lines, ""])


def page_of_rest() -> str:
    """docs/reference/rest.md: every route with its parameters, body and rule, from the OpenAPI document."""
    document = application().openapi()
    lines = [
        "# REST",
        "",
        "Below `/api/v1`, JSON, with `Authorization: Bearer TOKEN` (`rota token`). `/openapi.json` says the same in",
        "OpenAPI 3.1. Errors are `application/problem+json`: `code`, `detail`, `hint`, `request_id`",
        "([codes](errors.md)). `POST /jobs` takes an `Idempotency-Key`: asked again under it, also after a",
        "crash, it is still one job. Lists continue at `cursor=<next>`; events and logs are a page, or with",
        "`Accept: text/event-stream` a stream that resumes by `Last-Event-ID`. A parameter or field that a route does",
        "not know is refused with those that it knows. Who may ask what: [share one",
        "installation](../how-to/users-and-secrets.md).",
        "",
        "A body needs `Content-Type: application/json`:",
        "",
        "```",
        'curl -H "Authorization: Bearer $(rota token)" -H "Content-Type: application/json" \\',
        '    -d \'{"source": "name: hello\\nroles: {main: {run: echo hello}}\\n"}\' http://127.0.0.1:7700/api/v1/jobs',
        "```",
        "",
        "| route | parameters | body | what |",
        "|---|---|---|---|",
    ]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            lines.append(_route(document, f"{method.upper()} {path}", operation))
    return "\n".join([*lines, ""])


def _route(document: Mapping[str, Any], name: str, operation: Mapping[str, Any]) -> str:
    asked = [one for one in operation.get("parameters", ()) if one["in"] in ("query", "header")]
    shown = ", ".join(f"`{one['name']}`" for one in asked if one["name"] not in ("accept", "last-event-id"))
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    refs = [one["$ref"] for one in (content, *content.get("anyOf", ())) if "$ref" in one]
    fields_of = document["components"]["schemas"][refs[0].rpartition("/")[2]]["properties"] if refs else {}
    body = ", ".join(f"`{name}`" for name in fields_of)
    words = " ".join(operation.get("description", "").split("\n\n")[0].split()).replace("``", "`")
    return f"| `{name}` | {shown} | {body} | {words} |"


def schema_of_job_file() -> str:
    """docs/reference/job.schema.json: JSON Schema for editors; the reader itself knows more rules."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": page_of_commands,
    "docs/reference/job-file.md": page_of_job_file,
    "docs/reference/exit-codes.md": page_of_exits,
    "docs/reference/settings.md": page_of_settings,
    "docs/reference/metrics.md": page_of_metrics,
    "docs/reference/rest.md": page_of_rest,
    "docs/reference/job.schema.json": schema_of_job_file,
}
