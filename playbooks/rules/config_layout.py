"""Sizes and processes that do not fit: config.layout-invalid, config.launcher-mismatch.

In: configurations, launchers' options, ranks that announced themselves, what the store counted, the
error that ended the job. Out: roots. Arithmetic decides: a size that does not divide while a
shape is refused; a count of processes that the launcher was told and the program did not expect.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from playbooks.lines import Event
from playbooks.rules.naming import broke, progressed, root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

_SHAPE = re.compile(
    r"^(?:RuntimeError|ValueError|AssertionError)\b.*?(?:\bshapes?\b|input of size|"
    r"size mismatch|sizes of tensors|divisible|multiple of|mat1 and mat2|split_size|\bchunks?\b|"
    r"must match the size|assert\b.* % .*== ?0)",
    re.IGNORECASE,
)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Layouts, then processes."""
    del policy
    if not broke(evidence):
        return []
    return _layout(evidence) or _launcher(evidence)


# --- sizes ------------------------------------------------------------------------------------


def _sizes(evidence: Evidence) -> dict[str, Event]:
    """The one value of each size; sizes with several values are left out."""
    found: dict[str, dict[float, Event]] = defaultdict(dict)
    for event in evidence.lines.of("config.value"):
        value = event.number("value")
        if value is not None:
            found[event.text("name")].setdefault(value, event)
    plan = evidence.collected.plan
    for name, size in {**plan.sizes, "ep": plan.ep, "world": plan.world}.items() if plan else ():
        words = {"source": plan.source if plan else "plan", "locator": name, "time_ns": None}
        row = {**words, "rank": None, "host": None, "quote": f"{name}: {size}"}
        found[name].setdefault(size, Event("config.value", {"name": name, "value": size}, row))
    return {n: next(iter(v.values())) for n, v in found.items() if len(v) == 1}


def _violations(sizes: dict[str, Event]) -> list[tuple[str, tuple[str, ...]]]:
    """(what does not fit, sizes in it)."""

    def get(name: str) -> int:
        return int(sizes[name].number("value") or 0) if name in sizes else 0

    out: list[tuple[str, tuple[str, ...]]] = []
    for whole, part, words in (
        ("heads", "tp", "attention heads over tp"),
        ("experts", "ep", "experts over ep"),
        ("hidden", "tp", "hidden size over tp"),
        ("layers", "pp", "layers over pp"),
        ("kv_heads", "tp", "key and value heads over tp"),
    ):
        if whole == "kv_heads" and get(part) and get(part) % max(1, get(whole)) == 0:
            continue  # fewer heads than ranks are copied
        if get(whole) > 0 and get(part) > 1 and get(whole) % get(part):
            out.append(
                (f"{get(whole)} {words} {get(part)}: {get(whole)} is no multiple", (whole, part))
            )
    axes = [n for n in ("tp", "pp", "cp", "dp") if get(n) > 0]
    if get("world") > 0 and {"tp", "dp"} <= set(axes):
        product = 1
        for name in axes:
            product *= get(name)
        if get("world") % product and product != get("world"):
            shown = " * ".join(f"{n} {get(n)}" for n in axes)
            out.append((f"{shown} = {product} for a world of {get('world')}", ("world", *axes)))
    if get("global_batch") > 0 and get("micro_batch") > 0 and get("dp") > 0:
        product = get("micro_batch") * get("dp")
        if get("global_batch") % product:
            words = (
                f"global batch {get('global_batch')} over dp {get('dp')} * microbatch "
                f"{get('micro_batch')} = {product}: no multiple"
            )
            out.append((words, ("global_batch", "dp", "micro_batch")))
    replicas = get("dp") or get("world")
    parts = [get("micro_batch"), get("accumulation"), replicas]
    # DeepSpeed asserts the product; other frameworks derive one of its terms.
    if get("global_batch") > 0 and all(parts) and {"tp", "pp"}.isdisjoint(sizes):
        product = parts[0] * parts[1] * parts[2]
        if product != get("global_batch"):
            words = (
                f"train batch {get('global_batch')} is not microbatch {parts[0]} * accumulation "
                f"{parts[1]} * {parts[2]} ranks = {product}"
            )
            last = "dp" if get("dp") else "world"
            out.append((words, ("global_batch", "micro_batch", "accumulation", last)))
    return out


def _layout(evidence: Evidence) -> list[Finding]:
    real = [r for r in evidence.raised if r.kind.name in ("program", "layout")]
    refused = [r for r in real if r.kind.name == "layout" or _SHAPE.search(r.text)]
    if not refused or progressed(evidence):
        return []
    sizes = _sizes(evidence)
    violations = _violations(sizes)
    if not violations:
        return []
    words, names = violations[0]
    found = root(
        "config.layout-invalid",
        "likely",
        f"The parallel sizes do not fit: {words}; so the job fails with {refused[0].text[:120]}.",
        [sizes[n] for n in names],
        more=[refused[0].item],
        excluded=(
            ("crash.user-exception", "the refused value follows from a parallel size"),
            ("hang.collective-mismatch", "a shape is refused before any collective"),
            ("config.launcher-mismatch", "the processes are as ordered"),
        ),
        formula=words,
        advice=(
            f"Choose sizes that divide ({words}); `diag plan` lists the nearest legal ones.",
            "Change one size at a time.",
        ),
    )
    return [found.but(at_ns=refused[0].at_ns)]


# --- processes --------------------------------------------------------------------------------


def _number(evidence: Evidence, name: str) -> tuple[int, Event] | None:
    for event in evidence.lines.of("launch.option"):
        value = event.text("value")
        if event.text("name") == name and value.isdecimal():
            return int(value[:7]), event
    return None


def _launcher(evidence: Evidence) -> list[Finding]:
    if progressed(evidence):
        return []
    return _twice(evidence) or _fewer(evidence)


def _twice(evidence: Evidence) -> list[Finding]:
    """A global rank that two processes announce at once, while others never do."""
    told: dict[int, dict[tuple[object, object], Event]] = defaultdict(dict)
    worlds = set()
    for event in evidence.lines.of("train.world"):
        rank, world = event.number("rank"), event.number("world_size")
        if rank is None or world is None:
            continue
        worlds.add(int(world))
        local = re.search(r"\bpid[ =:]*(\d+)", event.item.quote)
        if local:
            told[int(rank)][event.place, local[1]] = event
    double = {r: e for r, e in told.items() if len(e) > 1}
    if not double or len(worlds) != 1 or evidence.lines.of("elastic.restart"):
        return []
    world = worlds.pop()
    absent = [r for r in range(world) if r not in told]
    if world > 1 and not absent:
        return []
    rank, lines = min(double.items())
    return [
        _started(
            f"Rank {rank} of {world} is announced by {len(lines)} processes: each process was "
            "started as if it were alone.",
            list(lines.values()),
        )
    ]


def _fewer(evidence: Evidence) -> list[Finding]:
    """The launcher was told to start fewer processes than the program waits for."""
    missing = evidence.lines.of("store.clients-missing")
    expected = {int(n) for e in missing if (n := e.number("expected")) is not None}
    joined = max((int(n) for e in missing if (n := e.number("joined")) is not None), default=None)
    announced: set[int] = set()
    for event in evidence.lines.of("train.world"):
        rank, world = event.number("rank"), event.number("world_size")
        if rank is not None and world is not None:
            announced.add(int(rank))
            expected.add(int(world))
    if len(expected) != 1:
        return []
    world = expected.pop()
    tasks = _number(evidence, "ntasks")
    if tasks is None:
        nodes, each = _number(evidence, "nodes"), _number(evidence, "ntasks-per-node")
        torchrun = _number(evidence, "nproc-per-node")
        if nodes and each:
            tasks = (nodes[0] * each[0] * (torchrun[0] if torchrun else 1), each[1])
    if tasks is None or tasks[0] == world or tasks[0] <= 1:
        return []
    if joined is not None and joined != tasks[0]:
        return []
    if joined is None and len(announced) != tasks[0]:
        return []
    return [
        _started(
            f"The launcher was told to start {tasks[0]} processes, the program waits for {world}"
            f"{f' and {joined} came' if joined is not None else ''}.",
            [tasks[1], *missing[:1], *evidence.lines.of("train.world")[:2]],
            formula=f"tasks {tasks[0]} != world size {world}",
        )
    ]


def _started(summary: str, events: list[Event], formula: str | None = None) -> Finding:
    return root(
        "config.launcher-mismatch",
        "likely",
        summary,
        events,
        excluded=(
            ("config.rendezvous", "those that were started met at one address"),
            ("hang.rank-stalled", "the missing ranks were never started"),
            ("hang.rank-died", "the missing ranks were never started"),
            ("hang.slow-not-dead", "the missing ranks were never started"),
            ("crash.user-exception", "the program waits for processes nobody started"),
        ),
        formula=formula,
    )
