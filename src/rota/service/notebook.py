"""How documents look in a notebook: names and values, and a table of each list; the texts of jobs are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

ROWS_MAX, COLUMNS_MAX, CELL_MAX = 50, 12, 200


class Document(dict[str, Any]):
    """A document of the API: a dict that a notebook draws as a table."""

    def _repr_html_(self) -> str:
        return html_of(self)


def html_of(document: Mapping[str, object]) -> str:
    """The fields with a plain value as one table, ``items`` and other lists of objects as one table each."""
    head = str(document.get("kind", "")) + (f" {document['job']}" if document.get("job") else "")
    plain, lists = dict[str, object](), dict[str, Sequence[Mapping[str, object]]]()
    for name, value in document.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            lists[name] = value
        elif name not in ("api", "kind", "job", "next") and value not in (None, "", [], {}):
            plain[name] = value
    parts = [f"<b>{escape(head)}</b>"] * bool(head)
    parts += [pairs_html(plain.items())] * bool(plain)
    parts += [f"{escape(name) if name != 'items' else ''}{table_html(rows)}" for name, rows in lists.items()]
    return "".join(parts) or "<i>empty</i>"


def pairs_html(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values, one a row."""
    rows = "".join(f"<tr><th style='text-align:left'>{escape(k)}</th><td>{_cell(v)}</td></tr>" for k, v in pairs)
    return f"<table>{rows}</table>"


def table_html(rows: Sequence[Mapping[str, object]]) -> str:
    """One row an object, without columns that are empty in all; what is beyond the limits is counted."""
    names = [name for name in rows[0] if any(one.get(name) not in (None, "", [], {}) for one in rows)]
    shown = names[:COLUMNS_MAX]
    head = "".join(f"<th>{escape(name)}</th>" for name in shown)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(one.get(name))}</td>" for name in shown) + "</tr>" for one in rows[:ROWS_MAX]
    )
    more = [f"{len(rows) - ROWS_MAX} more rows"] * (len(rows) > ROWS_MAX)
    more += [f"columns left out: {', '.join(map(escape, names[COLUMNS_MAX:]))}"] * (len(names) > COLUMNS_MAX)
    return f"<table><tr>{head}</tr>{body}</table>{'; '.join(more)}"


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    if text.startswith(("http://", "https://")):
        return f"<a href='{escape(text)}'>{escape(text)}</a>"
    long = len(text) > CELL_MAX
    return f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text[:CELL_MAX]) + ("..." if long else "")
