"""What two runs were told and found: command, code, versions, environment, layout, machine.

In: Evidence of each. Out: `Fact`s that differ, most telling kind first. What only one run knows is
shown as such; what neither knows is not a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playbooks.evidence import Evidence

_AXES = ("pp", "dp", "cp", "tp", "ep")


@dataclass(frozen=True)
class Fact:
    """Something told of both runs that differs."""

    kind: str
    """command, code, version, environment, layout or machine."""
    name: str
    a: str | None
    """None: A lacks it."""
    b: str | None


def facts(a: Evidence, b: Evidence) -> Iterator[Fact]:
    """Every difference."""
    for kind, told in _KINDS.items():
        ours, theirs = told(a), told(b)
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name):
                yield Fact(kind, name, ours.get(name), theirs.get(name))


def _command(evidence: Evidence) -> dict[str, str]:
    """Each option and setting by name; words without a name count by their place."""
    words = [str(word) for word in evidence.run.get("command") or []]
    out: dict[str, str] = {}
    place = 0
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals:
            out[name] = value
        elif word.startswith("-"):
            follows = words[at + 1] if at + 1 < len(words) else "-"
            out[word] = "set" if follows.startswith("-") or "=" in follows else follows
        elif not (at and words[at - 1].startswith("-") and out.get(words[at - 1]) == word):
            out[f"word {place}"] = word
            place += 1
    return out


def _code(evidence: Evidence) -> dict[str, str]:
    return _texts(evidence.run.get("code")) | _texts({"cwd": evidence.run.get("cwd")})


def _versions(evidence: Evidence) -> dict[str, str]:
    return _texts(evidence.run.get("versions"))


def _environment(evidence: Evidence) -> dict[str, str]:
    return _texts(evidence.run.get("environment"))


def _layout(evidence: Evidence) -> dict[str, str]:
    """World size, and the size of each axis: from coordinates, else from a plan."""
    out: dict[str, int | None] = {"world size": evidence.world_size}
    rows = evidence.rank_rows.values()
    for axis in _AXES:
        places = {row[axis] for row in rows if row[axis] is not None}
        if places:
            out[axis] = len(places)
        elif evidence.collected.plan is not None:
            out[axis] = evidence.collected.plan.sizes.get(axis, 1)
    return _texts(out)


def _machine(evidence: Evidence) -> dict[str, str]:
    devices = sorted({str(row["device"]) for row in evidence.rank_rows.values() if row["device"]})
    hosts = sorted(set(evidence.hosts.values()))
    return _texts({"hosts": ", ".join(hosts), "devices": ", ".join(devices)})


def _texts(told: Any) -> dict[str, str]:
    """The known entries of a mapping as text."""
    if not isinstance(told, dict):
        return {}
    return {str(k): str(v) for k, v in told.items() if v is not None and v != ""}


_KINDS = {
    "layout": _layout,
    "command": _command,
    "code": _code,
    "version": _versions,
    "environment": _environment,
    "machine": _machine,
}
