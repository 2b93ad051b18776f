"""`diag explain CAUSE`: one cause of the taxonomy, in full.

In: a cause's id, or its last part where that is unique. Out: what it is, what decides it, its
look-alikes, effects, cures, and what not to do. Exit codes: 0, 2 unknown, with the nearest ids.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from diag.commands import _output

if TYPE_CHECKING:
    from playbooks.knowledge import Cause


@click.command("explain", short_help="what a cause is, what decides it, its cures")
@click.argument("cause", metavar="CAUSE")
@_output.options_of("text", "json", "md")
def command(cause: str, form: str, output: str | None) -> int:
    """Explain CAUSE, such as hang.rank-died (or just rank-died)."""
    found = _find(cause)
    if form == "json":
        answer = json.dumps(as_json(found), indent=2)
    elif form == "md":
        answer = as_markdown(found)
    else:
        answer = as_text(found, _output.terminal_width(), colour=_output.wants_colour(output))
    _output.write(answer, output)
    return 0


def _find(text: str) -> Cause:
    from playbooks import knowledge

    known = knowledge.causes()
    low = text.strip().lower()
    matching = [c for i, c in known.items() if low in (i, i.split(".", 1)[1])]
    if len(matching) == 1:
        return matching[0]
    if matching:
        listed = ", ".join(c.id for c in matching)
        raise click.UsageError(f"{text!r} is several causes: {listed}")
    near = knowledge.nearest(low)
    hint = f"did you mean {' or '.join(near)}?" if near else "families: hang, crash, oom, slow, ..."
    raise click.UsageError(f"there is no cause {text!r}; {hint}")


def _sections(cause: Cause) -> list[tuple[str, list[str]]]:
    """(name, paragraphs or entries) in the order of reading."""
    likes = [f"{other}, because {because}" for other, because in cause.look_alikes()]
    return [
        ("decides", [_decides(cause)]),
        ("where", [", ".join(cause.reasons)] if cause.reasons else []),
        ("not", likes),
        ("effects", list(cause.cascade)),
        ("do", list(cause.advice)),
        ("don't", list(cause.not_advice)),
        ("look in", [", ".join(cause.evidence)]),
    ]


def _decides(cause: Cause) -> str:
    """What decides, without the look-alikes, on one line."""
    kept = []
    for line in cause.decides.splitlines():
        if line.startswith("not "):
            kept.append("")
        elif kept and not kept[-1] and line.startswith("  "):
            continue
        else:
            kept.append(line.strip())
    return " ".join(k for k in kept if k)


def as_text(cause: Cause, width: int, *, colour: bool) -> str:
    """For a terminal, wrapped to `width`."""
    strong = (lambda t: f"\x1b[1m{t}\x1b[0m") if colour else str
    lines = [f"  {strong(cause.id)}", *textwrap.wrap(cause.title, width - 4, initial_indent="  ",
                                                      subsequent_indent="  ")]  # fmt: skip
    for name, entries in _sections(cause):
        if not entries:
            continue
        lines.append("")
        for number, entry in enumerate(entries, 1):
            mark = f"{number}. " if name == "do" else "- " if len(entries) > 1 else ""
            body = textwrap.wrap(
                mark + entry, width - 11, subsequent_indent=" " * len(mark), break_on_hyphens=False
            )
            head = f"  {name:<8} " if number == 1 else " " * 11
            lines += [f"{head if i == 0 else ' ' * 11}{line}" for i, line in enumerate(body)]
    return "\n".join(lines) + "\n"


def as_markdown(cause: Cause) -> str:
    """For an issue or a chat."""
    from playbooks.report.markdown import prose

    lines = [f"# {cause.id}", "", prose(cause.title)]
    for name, entries in _sections(cause):
        if entries:
            lines += ["", f"## {name}", ""]
            lines += [prose(entries[0])] if len(entries) == 1 else [
                f"{'1.' if name == 'do' else '-'} {prose(e)}" for e in entries
            ]  # fmt: skip
    return "\n".join(lines) + "\n"


def as_json(cause: Cause) -> dict[str, Any]:
    """Schema diag.cause/1: the entry of the taxonomy with its look-alikes apart."""
    return {
        "schema": "diag.cause/1",
        "cause": cause.id,
        "title": cause.title,
        "decides": _decides(cause),
        "reasons": list(cause.reasons),
        "look_alikes": [{"cause": c, "because": b} for c, b in cause.look_alikes()],
        "cascade": list(cause.cascade),
        "advice": list(cause.advice),
        "not_advice": list(cause.not_advice),
        "evidence": list(cause.evidence),
    }
