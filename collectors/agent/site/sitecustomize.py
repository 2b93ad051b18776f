"""First on PYTHONPATH under `diag run`: loads the agent, then the sitecustomize that was there.

Whatever goes wrong here must not reach the job: the worst outcome is a job without the agent.
"""

import importlib.util
import os
import sys


def _load_agent(here: str) -> None:
    folder = os.path.dirname(here)  # noqa: PTH120  pathlib costs start-up time in every process
    spec = importlib.util.spec_from_file_location(
        "_diag_agent",
        os.path.join(folder, "__init__.py"),  # noqa: PTH118
        submodule_search_locations=[folder],
    )
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules["_diag_agent"] = package
    spec.loader.exec_module(package)
    importlib.import_module("_diag_agent.bootstrap").start()


def _chain(here: str) -> None:
    sys.path[:] = [entry for entry in sys.path if entry != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as missing:
        if missing.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
try:
    if os.environ.get("DIAG_RUN_DIR"):
        _load_agent(_here)
except Exception as _problem:  # noqa: BLE001  the job must start whatever happens here
    sys.stderr.write(f"diag: this process is not watched: {_problem!r}\n")
_chain(_here)
