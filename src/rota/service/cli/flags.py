"""Flags that every verb has, and what they make: a terminal and a client."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from rota.service.cli.output import FORMS, Terminal, form_of, terminal_for
from rota.spec.errors import BadInput

if TYPE_CHECKING:
    from rota.service.client import Client
    from rota.service.config import Settings

D = TypeVar("D", bound=Mapping[str, Any])
JOB = Annotated[str, Parameter(help="Id or a unique prefix of one.")]
COMMON = Group("Every verb", sort_key=99)


@Parameter(name="*", group=COMMON)
@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of every verb."""

    json: Annotated[bool, Parameter(help="Print one JSON document and nothing else on stdout.")] = False
    output: Annotated[str, Parameter(name=["-o", "--output"], help="table, wide, json or yaml.")] = "table"
    server: Annotated[str, Parameter(help="Address of the service; default: the one of this machine.")] = ""
    token: Annotated[str, Parameter(help="Token; better in ROTA_TOKEN.")] = ""
    no_color: Annotated[bool, Parameter(help="No colour; NO_COLOR does the same.")] = False
    quiet: Annotated[bool, Parameter(help="No progress on stderr.")] = False
    verbose: Annotated[bool, Parameter(name=["-v", "--verbose"], help="Print each request on stderr.")] = False

    def terminal(self) -> Terminal:
        """Where this verb prints. Raises BadInput for an unknown ``-o``."""
        form = form_of("json" if self.json else self.output)
        if form is None:
            raise BadInput(f"-o {self.output}: not a form", hint=", ".join(FORMS))
        return terminal_for(form=form, quiet=self.quiet, no_color=self.no_color)

    def client(self) -> Client:
        """A client of the service."""
        from rota.service.client import Client

        if self.verbose:  # httpx reports each request at this level
            logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
        return Client(self.server, self.token)

    def answer(self, ask: Callable[[Client], D], show: Callable[[Terminal, D], None]) -> int:
        """Print the document that the service gives; the exit status. ``show`` draws it for people."""

        def asked() -> D:
            with self.client() as client:
                return ask(client)

        return self.show(asked, show)

    def show(
        self,
        make: Callable[[], D],
        show: Callable[[Terminal, D], None],
        failed: Callable[[D], object] = lambda _: False,
    ) -> int:
        """Print the document that ``make`` gives, drawn by ``show`` for people; exit status 1 if it ``failed``."""
        terminal = self.terminal()
        document = make()
        terminal.show(document, lambda term: show(term, document))
        return 1 if failed(document) else 0

    def settings(self, **more: object) -> Settings:
        """The settings of this process, flags first. Raises BadInput for one that cannot be."""
        from rota.service.config import load_settings

        return load_settings({"server": self.server, "token": self.token, **more})


DEFAULT_FLAGS = Flags()


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal; elsewhere ``--yes`` must have been given. Raises BadInput when the answer is not yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadInput(f"{question.rstrip('?')}; add --yes")
    print(f"{question.rstrip('?')}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise BadInput("not confirmed")
