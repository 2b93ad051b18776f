"""This node's topology, asked of `nvidia-smi topo -m`.

In: nothing. Out: a Reading of what it printed, or None on a machine without the program. The
program gets some seconds; a driver that hangs must not hang us.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import TYPE_CHECKING

from collectors.collected import Reading, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND = ("nvidia-smi", "topo", "-m")
_PATIENCE = 20


def local(command: Sequence[str] = COMMAND) -> Reading | None:
    """What this node's GPUs and NICs are joined by; None when there is nobody to ask."""
    from collectors.readers import topo_matrix
    from collectors.readers.artifact import from_bytes

    if shutil.which(command[0]) is None:
        return None
    name = " ".join(command)
    try:
        asked = subprocess.run(command, capture_output=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as wrong:
        return Reading(Source(name, topo_matrix.KIND, "none", (f"it did not answer: {wrong}",)))
    if asked.returncode != 0:
        said = asked.stdout.decode("utf-8", "replace").strip().splitlines()
        why = said[0] if said else f"it ended with exit code {asked.returncode}"
        return Reading(Source(name, topo_matrix.KIND, "none", (why,)))
    host = platform.node() or "this node"
    text = f"host: {host}\n".encode() + asked.stdout
    return topo_matrix.read(from_bytes(text, name))
