"""The templates in the package: jobs to begin with, for ``rota init`` and the page that submits."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

SCRIPT_SUFFIX = ".txt"
"""Scripts of templates carry it in the package, so that they are not modules of Rota."""


def _templates() -> Traversable:
    return resources.files("rota.service").joinpath("templates")


def template_names() -> list[str]:
    """Names of the templates in the package."""
    return sorted(entry.name for entry in _templates().iterdir() if entry.joinpath("job.yaml").is_file())


def template_files(name: str) -> dict[str, str]:
    """File name to text of one template, the job file first."""
    entries = sorted(_templates().joinpath(name).iterdir(), key=lambda entry: (entry.name != "job.yaml", entry.name))
    return {entry.name.removesuffix(SCRIPT_SUFFIX): entry.read_text(encoding="utf-8") for entry in entries}


def about(name: str) -> str:
    """The first sentence of the comment above a template's job file."""
    lines = template_files(name)["job.yaml"].splitlines()
    words = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    return words.split(". ")[0].rstrip(".") + "."
