"""All numeric rules in their order: numbers first, printed results of checks, then source code.

In: Evidence and Policy. Out: their findings. What a check printed in words ("weights differ between
ranks") is asked only where no number decided, and source code only where no check did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.rules import (
    numeric_aux,
    numeric_claims,
    numeric_code,
    numeric_copies,
    numeric_logs,
    numeric_restart,
    numeric_runs,
    numeric_samples,
    numeric_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

RULES: tuple[Callable[[Evidence, Policy], list[Finding]], ...] = (
    numeric_logs.rule,
    numeric_copies.rule,
    numeric_samples.rule,
    numeric_restart.rule,
    numeric_aux.rule,
    numeric_tokens.rule,
    numeric_runs.rule,
)
FALLBACK: tuple[Callable[[Evidence, Policy], list[Finding]], ...] = (
    numeric_claims.rule,
    numeric_code.rule,
)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Findings of all rules on numbers, else of the first fallback that has any."""
    found = [finding for one in RULES for finding in one(evidence, policy)]
    for one in FALLBACK:
        if any(f.confidence != "possible" for f in found):
            break
        found += one(evidence, policy)
    return found
