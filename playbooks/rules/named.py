"""All rules over what artifacts name: configurations, machines, links, numbers in logs.

In: Evidence and Policy. Out: their findings together; the engine joins them with all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.rules import (
    config_gpus,
    config_host,
    config_layout,
    config_net,
    config_versions,
    link_counters,
    link_groups,
    link_nics,
    link_nvlink,
    link_paths,
    link_pcie,
    link_ports,
    link_rate,
    numeric,
    slow_logs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

RULES: tuple[Callable[[Evidence, Policy], list[Finding]], ...] = (
    config_layout.rule,
    config_gpus.rule,
    config_host.rule,
    config_net.rule,
    config_versions.rule,
    link_ports.rule,
    link_counters.rule,
    link_paths.rule,
    link_pcie.rule,
    link_nics.rule,
    link_nvlink.rule,
    link_groups.rule,
    link_rate.rule,
    slow_logs.rule,
    numeric.rule,
)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Findings of all of them."""
    return [finding for one in RULES for finding in one(evidence, policy)]
