"""Late ranks as logs and loose stacks show them: hang.slow-not-dead, hang.rank-stalled.

In: watchdog lines, counters that ranks print, stack dumps of some ranks. Out: at most one root
finding. Slow: the rank that the others wait for still counts up when they give up. Stalled: it sits
outside any collective in two looks, or fell silent although its process lived. A rank of which
nothing was given is never named.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.finding import Confidence, Finding, Item
from playbooks.policy import SECOND
from playbooks.rules.common import INSIDE
from playbooks.words import ranks_words, seconds

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.facts import Stack
    from playbooks.policy import Policy
    from playbooks.story import Count

_PLACES = (
    ("teardown", r"close|finish|shutdown|atexit|destroy|teardown|cleanup|__del__|_exit"),
    ("checkpoint", r"checkpoint|torch/serialization|save_state|\bsave\b|ckpt"),
    ("compile", r"inductor|_dynamo|cpp_extension|file_baton|triton/(?:compiler|runtime)"),
    ("evaluation", r"evaluat|valid|\beval|generate"),
    ("data", r"data|loader|token|encod|index|passage|shard|corpus|fetch|collate"),
)
_DATA = re.compile(
    r"data|token|encod|index|passage|shard|corpus|file|preprocess|download|sample|example|\bmap\b",
    re.IGNORECASE,
)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """What the logs show, else what the stacks show."""
    if evidence.run:
        return []
    slow = _counting(evidence, policy)
    if slow:
        return [_slow(evidence, policy, slow)]
    found = _stacks(evidence, policy)
    if found is None:
        found = _silent(evidence, policy)
    return [] if found is None else [found]


def _counting(evidence: Evidence, policy: Policy) -> dict[int, list[Count]]:
    """Absent ranks whose counters rose while the others waited, up to the end of the wait."""
    story = evidence.story
    since, expired = story.since_ns, story.expired_ns
    if since is None or expired is None or len(story.waiting) < len(story.ranks) / 2:
        return {}
    out = {}
    for rank in sorted(story.absent):
        counts = [c for c in story.counts.get(rank, []) if c.row["kind"] == "rank.progress"]
        timed = [(c.at_ns, c) for c in counts if c.at_ns is not None]
        during = [c for at, c in timed if since <= at <= expired]
        if len(during) < 2 or during[-1].done <= during[0].done:
            continue
        times = [at for at, c in timed]
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
        usual = max(gaps[len(gaps) // 2], SECOND)
        if expired - max(at for at in times if at <= expired) <= policy.count_silence * usual:
            out[rank] = during
    return out


def _slow(evidence: Evidence, policy: Policy, slow: dict[int, list[Count]]) -> Finding:
    ranks = tuple(slow)
    story = evidence.story
    first, last = slow[ranks[0]][0], slow[ranks[0]][-1]
    wait = next(iter(story.waiting.values()))
    limit = f" of {seconds(wait.limit_ms / 1000)}" if wait.limit_ms else ""
    of = f" of {last.total:.0f}" if last.total else ""
    items = [logs.item(c.row) for r in ranks[:2] for c in (slow[r][0], slow[r][-1])]
    return Finding(
        "hang.slow-not-dead",
        "root",
        "likely",
        f"{ranks_words(ranks, capital=True)} was still at work when the timeout{limit} of "
        f"{ranks_words(story.waiting)} ran out: it counted from {first.done:.0f} to "
        f"{last.done:.0f}{of} while they waited.",
        ranks=ranks,
        where=_where_of(str(last.row["quote"] or "")),
        evidence=tuple((*items, logs.item(wait.row))[: policy.evidence_most]),
        excluded=(
            ("hang.rank-stalled", "its counter moved while the others waited"),
            ("hang.rank-died", "its output continues"),
        ),
        at_ns=story.since_ns,
    )


def _where_of(text: str) -> str | None:
    low = text.lower()
    for where, words in (("evaluation", ("eval", "valid")), ("compile", ("compil",))):
        if any(w in low for w in words):
            return where
    if "checkpoint" in low or "saving" in low or "ckpt" in low:
        return "checkpoint"
    return "data" if _DATA.search(low) else None


def _outside(stack: Stack) -> bool:
    """Whether the innermost frames are neither a collective nor a wait for the device."""
    return not any(INSIDE.search(frame) for frame in stack.frames[:6])


def _stacks(evidence: Evidence, policy: Policy) -> Finding | None:
    """Few ranks outside every collective while others are known to wait."""
    looks = {r: s for r, s in evidence.stacks.items() if s}
    outside = sorted(r for r, s in looks.items() if all(_outside(x) for x in s))
    inside = set(looks) - set(outside) | set(evidence.story.waiting) | _say_waiting(evidence)
    inside -= set(outside)
    if not outside or not inside or len(outside) > len(inside):
        return None
    if set(outside) & set(evidence.story.timeouts) or _ended_first(evidence, outside):
        return None
    moved = [
        looks[r][0].places != looks[r][-1].places if len(looks[r]) > 1 else None for r in outside
    ]
    items = []
    for rank in outside[:3]:
        stack = looks[rank][-1]
        count = len(looks[rank])
        text = f"main thread of rank {rank} ({count} looks): {' <- '.join(stack.frames[:4])}"
        items.append(Item(stack.item.source, stack.item.locator, text))
    items += _wait_items(evidence, inside)
    finding = Finding(
        "hang.rank-stalled",
        "root",
        _confidence(evidence, moved),
        f"{ranks_words(outside, capital=True)} sits in {looks[outside[0]][-1].frames[0]} outside "
        f"any collective while {ranks_words(inside)} wait.",
        ranks=tuple(outside),
        where=_place(evidence, looks[outside[0]][-1], outside[0]),
        evidence=tuple(items[: policy.evidence_most]),
        excluded=(("hang.rank-died", "the process is there"),),
        at_ns=evidence.story.since_ns or _last_word(evidence, outside),
    )
    if any(moved):
        return finding.but(
            cause="hang.slow-not-dead",
            confidence="likely",
            where=finding.where if finding.where != "teardown" else None,
            excluded=(("hang.rank-stalled", "its frames changed between two looks"),),
        )
    return finding


def _confidence(evidence: Evidence, moved: list[bool | None]) -> Confidence:
    if all(m is False for m in moved):
        return "likely"
    return "likely" if evidence.story.timeouts else "possible"


def _say_waiting(evidence: Evidence) -> set[int]:
    """Ranks whose last own word is that they wait."""
    out: set[int] = set()
    kinds = ("rank.waiting", "rank.progress", "train.step", "train.epoch-end", "train.done")
    for row, _fields in evidence.story.of(*kinds):
        if row["rank"] is None:
            continue
        if row["kind"] == "rank.waiting":
            out.add(row["rank"])
        else:
            out.discard(row["rank"])
    return out


def _wait_items(evidence: Evidence, inside: set[int]) -> list[Item]:
    rows = [t.row for r, t in sorted(evidence.story.waiting.items()) if r in inside][:1]
    rows += [row for row, _ in evidence.story.of("rank.waiting") if row["rank"] in inside][:2]
    return [logs.item(row) for row in rows]


def _place(evidence: Evidence, stack: Stack, rank: int) -> str | None:
    done = {row["rank"] for row, _ in evidence.story.of("train.done")}
    if rank in done:
        return "teardown"
    text = "\n".join(stack.frames)
    return next((w for w, p in _PLACES if re.search(p, text, re.IGNORECASE)), None)


def _ended_first(evidence: Evidence, ranks: list[int]) -> bool:
    """Whether one of the ranks raised an error of its own."""
    return any(r.rank in ranks and r.kind.cause is not None for r in evidence.raised)


def _last_word(evidence: Evidence, ranks: list[int]) -> int | None:
    times = [
        row["time_ns"]
        for row in evidence.story.rows
        if row["rank"] in ranks and row["time_ns"] is not None
    ]
    return max(times) if times else None


def _silent(evidence: Evidence, policy: Policy) -> Finding | None:
    """One or few ranks without a timeout, whose own watchdog shows that they had not come."""
    story = evidence.story
    since = story.since_ns
    absent = sorted(story.absent)
    if since is None or not absent or len(absent) * 4 > len(story.ranks) or evidence.missing:
        return None
    seq = next(iter(story.waiting.values())).seq or 0
    signs: dict[int, dict[str, Any]] = {}
    for row, fields in story.of("nccl.dump-signal", "nccl.watchdog-status", "nccl.desync"):
        enqueued = fields.get("last_enqueued")
        if row["rank"] in absent and isinstance(enqueued, int) and enqueued < seq:
            signs[row["rank"]] = row
    if set(signs) != set(absent) or _ended_first(evidence, absent):
        return None
    if any(row["rank"] in absent for row, _ in story.of("nccl.gil", "nccl.heartbeat-stuck")):
        return None
    words: list[dict[str, Any]] = []
    for rank in absent:
        own = [r for r in story.rows if r["rank"] == rank and not r["kind"].startswith("nccl.")]
        words += own[-1:]
    where = _where_of(str(words[-1]["quote"] or "")) if words else None
    items = [logs.item(r) for r in signs.values()][:3] + [logs.item(r) for r in words[:2]]
    items += [logs.item(next(iter(story.waiting.values())).row)]
    return Finding(
        "hang.rank-stalled",
        "root",
        "likely",
        f"{ranks_words(absent, capital=True)} lived and had not come to operation #{seq} in which "
        f"{ranks_words(story.waiting)} waited.",
        ranks=tuple(absent),
        where=where,
        evidence=tuple(items[: policy.evidence_most]),
        excluded=(
            ("hang.rank-died", "its own watchdog thread still wrote"),
            ("hang.slow-not-dead", "nothing shows that it moved"),
        ),
        at_ns=since,
    )
