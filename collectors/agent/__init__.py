"""What runs inside somebody's training processes: it records, and does nothing else.

The package is loaded in the job under the name `_diag_agent` (see site/sitecustomize.py), so that a
job with a package of its own called `collectors` keeps it. Hence: only relative imports here, and
only the standard library, torch apart, in everything that runs inside the job.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_DIR = "DIAG_RUN_DIR"
"""Environment variable: the run directory; without it the agent stays away."""
CLAIM = "DIAG_RANK_PID"
"""Environment variable: pid of the process that already is this rank; its children are none. With
ALONE before it, a process without a group: its children may still turn out to be ranks of one."""
ALONE = "alone:"


def environment(run_dir: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The job's environment: `base`, with our sitecustomize first on the path of Python."""
    here = Path(__file__).resolve().parent
    env = {key: value for key, value in base.items() if key != CLAIM}
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = str(here / "site") + (os.pathsep + before if before else "")
    env[RUN_DIR] = str(run_dir.resolve())
    return env
