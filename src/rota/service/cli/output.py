"""What verbs print: one JSON or YAML document for programs, tables for people, progress and mistakes on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, get_args

from rota.service.cli import shell
from rota.spec.codec import API
from rota.spec.errors import JobFileError, RotaError

if TYPE_CHECKING:
    from rich.console import Console

Form = Literal["table", "wide", "json", "yaml"]
FORMS: tuple[Form, ...] = get_args(Form)
GAP, NO_VALUE = "   ", "-"
WIDTH_PIPE, WIDTH_WIDE = 200, 2000
"""Characters in a line of a table that goes to a file or a pipe, and of one that must not be folded."""
WORD_WHOLE_MAX = 40
"""Longer words, such as paths, may be split where a table would be wider than the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Where answers go and in which form. ``json`` is set: stdout is exactly one document (one a line when following);
    with ``yaml`` it is in YAML (one after ``---`` each when following). ``wide``: tables have every column.

    ``colour`` and ``live`` are False unless the stream is a terminal that can show them.
    """

    json: bool = False
    yaml: bool = False
    wide: bool = False
    quiet: bool = False
    colour: bool = False
    live: bool = False
    out: IO[str] = sys.stdout
    err: IO[str] = sys.stderr

    def show(self, document: Mapping[str, object], table: Callable[[Terminal], None]) -> None:
        """The answer: the document as it is, or drawn by ``table``."""
        if self.json:
            self.line(self._text(_headed(document), indent=2))
        else:
            table(self)

    def show_line(self, document: Mapping[str, object], text: str) -> None:
        """One of many answers, as they come."""
        self.line(("---\n" if self.yaml else "") + self._text(_headed(document)) if self.json else text)

    def _text(self, document: Mapping[str, object], indent: int | None = None) -> str:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=indent, default=str)
        if not self.yaml:
            return text
        from rota.service.jobfile.nodes import yaml_text  # noqa: PLC0415 - only when YAML is asked for

        return yaml_text(json.loads(text)).rstrip("\n")

    def line(self, text: str = "") -> None:
        """A line of the answer. Ends the process in order when the reader of stdout is gone."""
        try:
            print(text, file=self.out, flush=True)
        except BrokenPipeError:
            _end()

    def note(self, text: str) -> None:
        """Progress and advice, on stderr."""
        if not self.quiet:
            self._tell(text)

    def console(self) -> Console:
        """A rich console on stdout that obeys colour and width."""
        from rich.console import Console  # noqa: PLC0415 - only when a table is drawn

        return Console(
            file=self.out,
            no_color=not self.colour,
            force_terminal=self.colour,
            width=WIDTH_WIDE if self.wide else None if self.live else WIDTH_PIPE,
            highlight=False,
            soft_wrap=False,
        )

    def draw(self, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        """A table without frames; numbers to the right, texts of several words folded between words.

        Headers, names and numbers stay whole: where they need more than a line of the terminal, the lines are longer.
        """
        from rich import box  # noqa: PLC0415 - only when a table is drawn
        from rich.table import Table as Drawn  # noqa: PLC0415 - the same
        from rich.text import Text  # noqa: PLC0415 - the same

        table = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        least = [least_width(name, [row[index] for row in cells]) for index, name in enumerate(header)]
        for index, column in enumerate(header):
            numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold", min_width=least[index])
        for row in cells:
            table.add_row(*(Text(cell, style=STATE_STYLE.get(cell, "")) for cell in row))
        console = self.console()
        console.width = max(console.width, sum(least) + len(GAP) * (len(least) - 1))
        with console.capture() as drawn:
            console.print(table)
        for line in drawn.get().splitlines():
            self.line(line if self.colour else line.rstrip())

    def pairs(self, rows: Iterable[tuple[str, object]]) -> None:
        """Names and values, one a line; empty values are left out."""
        shown = [(name, str(value)) for name, value in rows if value not in (None, "", [], {})]
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            self.line(f"{name:<{width}}  {value}")

    def error(self, exc: RotaError) -> None:
        """A mistake: with its place and caret on stderr; as a document of kind ``Error`` on stdout with ``--json``."""
        if self.json:
            self.line(self._text(error_document(exc), indent=2))
        if isinstance(exc, JobFileError) and exc.problems:
            from rota.service.jobfile.problems import Problem  # noqa: PLC0415 - only for a mistake in a job file

            for problem in exc.problems:
                self._tell(problem.render() if isinstance(problem, Problem) else str(problem))
        else:
            self._tell(f"rota: {exc.message}")
        if exc.hint:
            self._tell(f"      {exc.hint}")
        trace = str(exc.fields.get("traceback") or "").rstrip()
        if trace and not self.json:
            self._tell(trace)

    def _tell(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # who reads no more loses no more than that
            print(text, file=self.err, flush=True)


def _items(document: Mapping[str, Any]) -> Iterable[Any]:
    return document["items"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The table of a kind of document: a column for each header, which shows a field or what a function makes of a row.

    ``empty`` is printed in place of a table without rows. ``extra`` columns are left out, the last one first, while
    the table is wider than its lines; ``sparse`` ones where they are empty in every row. Numbers stand to the right.
    """

    columns: Mapping[str, str | Callable[[Any], object]]
    rows: Callable[[Any], Iterable[Any]] = _items
    empty: str = ""
    extra: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()

    def __call__(self, term: Terminal, document: Mapping[str, object]) -> None:
        """Draw it: ``flags.answer(ask, TABLE)``."""
        self.print(term, self.rows(document))

    def print(self, term: Terminal, rows: Iterable[object]) -> None:
        """Draw these rows."""
        made = [{name: _cell(column, row) for name, column in self.columns.items()} for row in rows]
        if not made and self.empty:
            term.line(self.empty)
            return
        names = [name for name in self.columns if name not in self.sparse or any(row[name] != NO_VALUE for row in made)]
        width = term.console().width
        for name in reversed(self.extra):
            if _width(names, made) > width and name in names:
                names.remove(name)
        term.draw(names, [[row[name] for name in names] for row in made])


def _cell(column: str | Callable[[Any], object], row: Any) -> str:
    value = row[column] if isinstance(column, str) else column(row)
    return NO_VALUE if value in (None, "") else str(value)


def least_width(header: str, cells: Iterable[str]) -> int:
    """Characters that a column needs so that neither its header nor a word of it is split; paths may be."""
    words = (word for cell in cells for word in cell.split(" "))
    return max(len(header), *(len(word) for word in words if len(word) <= WORD_WHOLE_MAX), 0)


def _width(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    """Characters of a line of the table when no cell is folded."""
    return sum(max(len(name), *(len(row[name]) for row in rows), 0) + len(GAP) for name in names) - len(GAP)


STATE_STYLE = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "READY": "green",
    "healthy": "green",
    "QUEUED": "yellow",
    "SUBMITTED": "yellow",
    "ADMITTED": "cyan",
    "STARTING": "cyan",
    "STALE": "cyan",
    "RECOVERING": "magenta",
    "STOPPING": "yellow",
    "FAILED": "red",
    "LOST": "red",
    "lost": "red",
    "removed": "yellow",
    "CANCELLED": "dim",
    "GONE": "dim",
}


def _end() -> NoReturn:
    """Leave in order. As it is entered the handler of SIGPIPE runs: what that raised in a generator's end was lost."""
    sys.exit(0)


def _headed(document: Mapping[str, object]) -> dict[str, object]:
    """The document with ``api`` in front, for those that verbs make themselves."""
    return {"api": API, **document} if "api" not in document else dict(document)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).replace("/", "", 1).isdigit()


def error_document(exc: RotaError) -> dict[str, object]:
    """What ``--json`` prints for a mistake."""
    from rota.service.jobfile.problems import Problem  # noqa: PLC0415 - only for a mistake

    problems = exc.problems if isinstance(exc, JobFileError) else ()
    return {
        "api": API,
        "kind": "Error",
        "code": exc.fields.get("said_code") or exc.fields.get("code") or exc.code,
        "exit": exc.exit,
        "message": exc.message,
        "hint": exc.hint,
        "errors": [problem.to_json() for problem in problems if isinstance(problem, Problem)],
        "fields": {name: value for name, value in exc.fields.items() if name not in ("said_code", "code")},
    }


def form_of(word: str) -> Form | None:
    """The form that ``-o word`` means; None for none."""
    return next((form for form in FORMS if form == word), None)


def terminal_for(*, form: Form, quiet: bool, no_color: bool) -> Terminal:
    """The terminal of this process; NO_COLOR, TERM=dumb and a pipe are obeyed."""
    return Terminal(
        json=form in ("json", "yaml"),
        yaml=form == "yaml",
        wide=form == "wide",
        quiet=quiet,
        colour=shell.colour_wanted() and not no_color,
        live=shell.draws_in_place(),
        out=sys.stdout,
        err=sys.stderr,
    )
