"""``python -m tests.service.snapshots [rest|cli] --write``: write the snapshots; without it show what differs."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.service.snapshots import files


def main() -> int:
    """Exit status 1 if a snapshot differs and was not written."""
    differing: list[str] = []
    for kind, made in files.KINDS.items():
        if {*files.KINDS} & {*sys.argv} and kind not in sys.argv:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(made(Path(folder, "home")))
        differing += files.compare(kind, found)
        if "--write" in sys.argv:
            files.write(kind, found)
    print("\n".join(differing) or "nothing differs")
    return 1 if differing and "--write" not in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
