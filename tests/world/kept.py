"""Seeds that once failed: they are kept in a file, and run each time."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("kept_seeds.txt")


def kept_seeds(file: Path = FILE) -> dict[int, str]:
    """Seed -> what it found when it failed; in the order in which they were kept."""
    rows = (line.split(maxsplit=1) for line in file.read_text(encoding="utf-8").splitlines())
    return {int(seed): "".join(found) for seed, *found in rows}


def keep_seed(seed: int, found: str, file: Path = FILE) -> None:
    """Add a seed that failed, once; a line of the file each."""
    if seed not in kept_seeds(file):
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{seed} {' '.join(found.split())[:200]}\n")
