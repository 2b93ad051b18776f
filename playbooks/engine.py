"""One question, one answer: what is wrong with this job?

In: Collected and a Policy. Out: a Report with exactly one of verdict, abstained and health. Every
rule is a pure function; the engine runs all of them, joins what they found into causes and effects,
and fills titles and advice from the taxonomy. It reads nothing and never raises on odd data of
foreign files: what a rule cannot use, it leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks import answers, joining, knowledge, metrics
from playbooks.evidence import Evidence
from playbooks.policy import Policy
from playbooks.report.model import Coverage, Report
from playbooks.rules import (
    data,
    death,
    device,
    ended,
    exceptions,
    gil,
    group_order,
    host_memory,
    late,
    link,
    memory,
    mismatch,
    named,
    p2p_order,
    stages,
    stall,
    straggler,
    swallowed,
    transport,
    uneven,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from collectors.collected import Collected
    from playbooks.finding import Finding

RULES: tuple[Callable[[Evidence, Policy], list[Finding]], ...] = (
    mismatch.rule,
    group_order.rule,
    p2p_order.rule,
    exceptions.rule,
    memory.rule,
    death.rule,
    host_memory.rule,
    stall.rule,
    device.rule,
    ended.rule,
    gil.rule,
    late.rule,
    swallowed.rule,
    uneven.rule,
    transport.rule,
    straggler.rule,
    stages.rule,
    data.rule,
    link.rule,
    named.rule,
)


def diagnose(collected: Collected, policy: Policy | None = None) -> Report:
    """The report on one job, or on a pile of artifacts."""
    policy = policy or Policy()
    evidence = Evidence(collected)
    numbers = metrics.measure(evidence, policy)
    found = [finding for rule in RULES for finding in rule(evidence, policy)]
    verdict, findings = joining.join(found, evidence, policy)
    findings = [_filled(f) for f in findings]
    verdict = None if verdict is None else findings[0]
    health, abstained = (None, None)
    if verdict is None:
        health, abstained = answers.answer(evidence, numbers, findings)
    return Report(
        verdict=verdict,
        findings=tuple(findings),
        abstained=abstained,
        health=health,
        metrics=numbers,
        coverage=_coverage(evidence),
        titles=_titles(findings),
    )


def _filled(finding: Finding) -> Finding:
    """Advice from the taxonomy where the rule gave none; effects and context get none."""
    if finding.role != "root" or finding.advice:
        return finding
    return finding.but(advice=knowledge.cause(finding.cause).advice_for(finding.where))


def _titles(findings: Sequence[Finding]) -> dict[str, str]:
    named = {f.cause for f in findings} | {c for f in findings for c, _ in f.excluded}
    known = knowledge.causes()
    return {cause: known[cause].title for cause in sorted(named) if cause in known}


def _coverage(evidence: Evidence) -> Coverage:
    return Coverage(
        world_size=evidence.world_size,
        ranks_seen=tuple(sorted(evidence.seen)),
        missing_ranks=evidence.missing,
        sources=tuple(evidence.collected.sources),
    )
