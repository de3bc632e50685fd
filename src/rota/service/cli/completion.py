"""What the Tab key may offer: verbs, flags, live jobs, queues, nodes, templates; and the scripts that ask for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

ANSWER_S = 0.3
"""Longest wait for live names; after it the shell gets none."""

SCRIPTS = {
    "bash": """_rota() {
    local IFS=$'\\n'
    COMPREPLY=($(rota completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -F _rota rota
""",
    "zsh": """#compdef rota
_rota() {
    local -a found
    found=("${(@f)$(rota completion words -- "${words[@]:1:$((CURRENT - 1))}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -a found; else _files; fi
}
compdef _rota rota
""",
    "fish": """function __rota_words
    rota completion words -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null
end
complete -c rota -f -a '(__rota_words)'
complete -c rota -n '__fish_seen_subcommand_from run graph' -F
""",
}
BEGIN, END = "# >>> rota completion >>>", "# <<< rota completion <<<"
JOB_VERBS = frozenset({"show", "explain", "logs", "stop", "set", "events", "failures", "why", "graph"})


def rc_file(shell: str, home: Path) -> Path:
    """Where the script of a shell is read from."""
    return {
        "bash": home / ".bashrc",
        "zsh": home / ".zshrc",
        "fish": home / ".config" / "fish" / "conf.d" / "rota.fish",
    }[shell]


def install(shell: str, home: Path) -> Path:
    """Put the script between its marks into the shell's file; again is harmless."""
    path = rc_file(shell, home)
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = without_block(old)
    glue = "" if not kept or kept.endswith("\n") else "\n"
    path.write_text(f"{kept}{glue}{BEGIN}\n{SCRIPTS[shell]}{END}\n", encoding="utf-8")
    return path


def uninstall(shell: str, home: Path) -> Path:
    """Take the script out again; the rest of the file stays byte for byte, and an empty file goes."""
    path = rc_file(shell, home)
    if path.exists():
        kept = without_block(path.read_text(encoding="utf-8"))
        if kept:
            path.write_text(kept, encoding="utf-8")
        else:
            path.unlink()
    return path


def without_block(text: str) -> str:
    """The text without the lines between the marks."""
    head, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(f"{END}\n")
    return head + tail if begin and end else text


def words_for(
    words: Sequence[str],
    verbs: Iterable[str],
    function_of: Callable[[str], Callable[..., int]],
    live: Callable[[str], list[str]],
) -> list[str]:
    """What may stand in place of the last of ``words``; ``live("jobs")`` gives names of the service."""
    *before, last = list(words) or [""]
    known = list(verbs)
    verb = next((one for one in (" ".join(before[:2]), *before[:1]) if one in known), "")
    if not verb:
        depth = len(before)
        offered = {one.split()[depth] for one in known if one.split()[:depth] == before and len(one.split()) > depth}
    elif last.startswith("-"):
        offered = set(flags_of(function_of(verb)))
    elif before[-1] in ("-q", "--queue"):
        offered = set(live("queues"))
    elif verb in JOB_VERBS:
        offered = set(live("jobs"))
    elif verb == "nodes":
        offered = {"drain", "cordon", "undrain", "uncordon"} if len(before) == 1 else set(live("nodes"))
    elif verb == "init":
        offered = set(live("templates"))
    else:
        offered = set()
    return sorted(word for word in offered if word.startswith(last))


def flags_of(function: Callable[..., object]) -> list[str]:
    """The long flags of a verb and those of every verb."""
    found: list[str] = []
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if isinstance(kind := hints[name], type) and is_dataclass(kind):  # several flags as one value
            found += flags_of(kind)
            continue
        extras = get_args(hints[name])[1:] if get_origin(hints[name]) is Annotated else ()
        given = next((extra.name for extra in extras if getattr(extra, "name", None)), None)
        shown = next((extra.show for extra in extras if getattr(extra, "show", None) is False), True)
        if shown is not False:
            names = [given] if isinstance(given, str) else given or [f"--{name.replace('_', '-')}"]
            found += [one for one in names if one.startswith("--")]
    return found
