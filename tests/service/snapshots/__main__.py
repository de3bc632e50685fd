"""``python -m tests.service.snapshots --write``: write every snapshot anew; without ``--write`` show what differs."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.service.snapshots import files


def main() -> int:
    """Exit status 1 if a snapshot differs and was not written."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(files.of_rest(Path(folder, "home")))
    differing = files.compare("rest", found)
    if "--write" in sys.argv:
        files.write("rest", found)
    print("\n".join(differing) or "nothing differs")
    return 1 if differing and "--write" not in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
