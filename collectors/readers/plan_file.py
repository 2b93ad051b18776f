"""plan.yaml: a parallel layout on a cluster, as `diag topo --plan` takes it.

In: a YAML mapping. Out: a Reading with a Plan, or one whose Source lists every reason against it.
Aliases are refused: a plan needs none, and nested ones grow without bound when they are printed.
So is deep nesting, whose cost grows with its square.
"""

from __future__ import annotations

import re

from collectors.collected import Reading, Source
from collectors.readers.artifact import Artifact, TooLargeError
from collectors.topology.plan import PlanError, parse_plan

KIND = "plan"
BYTES = 4 << 20
DEPTH = 8
"""A plan is a mapping with two lists."""
_WORLD = re.compile(rb"^world[ \t]*:", re.MULTILINE)
_OTHER = re.compile(rb"^(?:nodes|gpus_per_node|order|tp|pp|dp|cp|ep)[ \t]*:", re.MULTILINE)


def sniff(head: bytes) -> bool:
    """A top-level `world:` beside another key of a plan."""
    return _WORLD.search(head) is not None and _OTHER.search(head) is not None


def _load(text: str) -> object:
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise PlanError("aliases are not used in a plan")
        if depth > DEPTH:
            raise PlanError(f"a plan is not nested deeper than {DEPTH}")
    return yaml.safe_load(text)


def read(artifact: Artifact) -> Reading:
    """The plan, or the reasons why it is none."""
    import yaml

    try:
        data, broken = artifact.data(BYTES)
        if broken:
            raise PlanError(broken)
        plan = parse_plan(_load(data.decode("utf-8", "replace")), artifact.path)
    except (TooLargeError, PlanError) as wrong:
        lines = tuple(line.removeprefix(f"{artifact.path}: ") for line in str(wrong).splitlines())
        return Reading(Source(artifact.path, KIND, "none", lines))
    except yaml.YAMLError as wrong:
        first = str(wrong).splitlines()[0] if str(wrong) else "not YAML"
        mark = getattr(wrong, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark is not None else ""
        return Reading(Source(artifact.path, KIND, "none", (f"not YAML{place}: {first}",)))
    except (ValueError, RecursionError) as wrong:
        return Reading(Source(artifact.path, KIND, "none", (f"not a plan: {wrong}",)))
    return Reading(Source(artifact.path, KIND, "all"), plan=plan)
