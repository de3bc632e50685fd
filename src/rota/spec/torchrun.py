"""The torchrun line of a command: its options, and what each rank runs, or why it cannot be read."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import dropwhile

_FLAGS = frozenset({"--standalone", "--no-python", "-m", "--module", "--run-path"})
_REFUSED = frozenset({"--virtual-local-rank"})
_WORD = re.compile(r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\]|['\"\\])+", re.DOTALL)
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.", re.DOTALL)
_LITERAL = re.compile(r"'[^']*'|\\.", re.DOTALL)
_BACKGROUND = re.compile(r"&&|[<>]&|&>")
_STARTED = re.compile(r"(?:^|[\s;&|(])(?:\S*/)?torchrun\s|-m\s+torch\.distributed\.(?:run|launch)\b")
PYTHON_SWITCHES = frozenset({"-u", "-O", "-OO", "-B", "-I", "-E", "-s"})
"""Options of Python without a value, after which its program may stand."""
ALONE_HINT = (
    "write the torchrun line alone: what comes before it belongs into 'setup', what follows into the script; rota logs"
    " keeps the output of every rank"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunLine:
    """``local`` ranks in each instance. What they run is ``words``, or ``text`` where a shell expands it first."""

    local: int
    module: bool
    python: bool
    words: tuple[str, ...] = ()
    text: str = ""

    @property
    def program(self) -> str:
        """The script, module or program, without quotes."""
        found = None if self.words else _WORD.match(self.text)
        return self.words[0] if found is None else found.group().strip("'\"")


def is_torchrun(run: tuple[str, ...], *, shell: bool) -> bool:
    """True for ``torchrun ...`` and ``python -m torch.distributed.run ...``."""
    head = (run[0].split() if shell and run else list(run))[:3]
    program = head[0].rpartition("/")[2] if head else ""
    return program == "torchrun" or (program.startswith("python") and head[1:] == ["-m", "torch.distributed.run"])


def plain_words(text: str) -> list[str] | None:
    """The words of a line that means the same without a shell; None when a shell has to read it."""
    text = _one_line(text)
    if set(_LITERAL.sub("", text)) & set("$`") or set(_QUOTED.sub("", text)) & set("|&;<>\n*?[~#()"):
        return None
    try:
        return shlex.split(text)
    except ValueError:
        return None


def shell_operators(text: str) -> str:
    """The operators between commands, outside of quotes: ``|``, ``&&``, ``>`` and so on, in their order."""
    return "".join(char for char in _QUOTED.sub("", _one_line(text)) if char in "|&;<>\n")


def read_torchrun(run: tuple[str, ...], *, shell: bool) -> TorchrunLine:
    """The line of a command that ``is_torchrun``. Raises ValueError, which says what is wrong with it."""
    text = _one_line(run[0]) if shell else ""
    spans = [(found.group(), found.start()) for found in _WORD.finditer(text)] if shell else []
    words = [word for word, _ in spans] if shell else list(run)
    index = 1 if words[0].rpartition("/")[2] == "torchrun" else 3
    local, module, no_python = 1, False, False
    while index < len(words) and words[index].startswith("-"):
        name, sep, value = words[index].partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        index += 1
        if name == "--":
            break
        if name in _REFUSED:
            raise ValueError(f"torchrun option {name} is not supported: each rank sees the devices of its instance")
        if name in _FLAGS:
            module |= name in ("-m", "--module")
            no_python |= name == "--no-python"
            continue
        if not sep:
            if index >= len(words):
                raise ValueError(f"torchrun option {name} needs a value")
            value = words[index]
            index += 1
        if name == "--nproc-per-node":
            local = _count(_unquoted(value) if shell else value)
    if index >= len(words):
        raise ValueError("torchrun needs a script")
    rest = run[index:] if not shell else tuple(plain_words(text[spans[index][1] :]) or ())
    left = "" if rest else text[spans[index][1] :]
    return TorchrunLine(local=local, module=module, python=not no_python, words=rest, text=left)


def script_of(run: tuple[str, ...], *, shell: bool) -> str:
    """The file that a valid command has torchrun or Python run; empty where it names none, or a shell decides which."""
    if is_torchrun(run, shell=shell):
        line = read_torchrun(run, shell=shell)
        script = line.program if line.python and not line.module else ""
    else:
        words = (plain_words(run[0]) if shell else list(run)) or [""]
        after = list(dropwhile(PYTHON_SWITCHES.__contains__, words[1:]))
        script = after[0] if after and words[0].rpartition("/")[2].startswith("python") else ""
    return "" if script.startswith("-") or set(script) & set("$`*?[]{}~") else script


def problem_of(run: tuple[str, ...], *, shell: bool, instances: int, meshed: bool) -> tuple[str, str]:
    """What is wrong with a command that starts torchrun, and what to do instead; empty texts when nothing is."""
    if not is_torchrun(run, shell=shell):
        if shell and instances > 1 and not meshed and _STARTED.search(run[0]):
            return f"a shell in each of {instances} instances starts torchrun: {instances} worlds, not one", ALONE_HINT
        return "", ""
    try:
        read_torchrun(run, shell=shell)
    except ValueError as error:
        return str(error), "for example torchrun --nproc-per-node 2 train.py"
    found = shell_operators(run[0]) if shell else ""
    if "&" in _BACKGROUND.sub("", _QUOTED.sub("", _one_line(run[0]))) and found:
        return "'&' puts torchrun into the background: the command ends at once, and its ranks with it", ALONE_HINT
    if found and instances > 1:
        message = f"with {found.strip() or 'several lines'!r} a shell starts it in each of {instances} instances"
        return f"{message}: {instances} worlds, not one", ALONE_HINT
    return "", ""


def _one_line(text: str) -> str:
    """The text without the line breaks that a backslash takes away."""
    return text.replace("\\\n", " ").strip()


def _unquoted(word: str) -> str:
    """A word without its quotes; as it is when one of them has no end."""
    try:
        return " ".join(shlex.split(word))
    except ValueError:
        return word


def _count(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        shell = ": options are read before a shell sees them" if set(value) & set("$`") else ""
        raise ValueError(f"--nproc-per-node must be a whole number of at least 1, not {value!r}{shell}")
    return int(value)
