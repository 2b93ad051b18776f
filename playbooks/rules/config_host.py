"""What a host or its software refuses: shm, limits, GPU support, fabric manager, IMEX.

In: NCCL's and CUDA's failure lines with what is known of the host. Out: roots of config.shm-too-
small, os-limits, unsupported-arch, fabric-manager, imex, efa-provider. Each needs its own line; an
"unhandled system error" without one says nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.rules.naming import broke, root
from playbooks.words import size

if TYPE_CHECKING:
    from collections.abc import Callable

    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_MEMORY = (
    "ibv_reg_mr",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_reg_dmabuf",
    "ibv_alloc",
    "ibv_create",
)
_SYSTEM = re.compile(r"nccl|cuda|nvidia|driver|ofi\b|fabric|gpu", re.IGNORECASE)
_NOT_A_CRASH = ("crash.user-exception", "the refusal comes from the system, not from the program")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Every refusal that is on record in a job that failed."""
    if not broke(evidence):
        return [] if evidence.lines.of("train.done") else _efa(evidence, policy)
    parts: tuple[Callable[[Evidence, Policy], list[Finding]], ...] = (
        _shm,
        _memlock,
        _limits,
        _arch,
        _fabric,
        _imex,
        _efa,
    )
    return [f for part in parts for f in part(evidence, policy)]


def _shm(evidence: Evidence, policy: Policy) -> list[Finding]:
    lines = evidence.lines
    failed = lines.of("nccl.shm-failed", "dataloader.bus-error")
    killed = [e for e in lines.of("dataloader.worker-killed") if e.number("signal") == 7]
    said = failed + killed
    if not said:
        return []
    sizes = [e for e in lines.of("shm.size") if e.number("total") is not None]
    small = [e for e in sizes if _full(e, policy)]
    if sizes and not small:
        return []  # there was room: the error has another reason
    sure: Confidence = "certain" if small else "likely"
    told = f" ({size(small[0].number('total') or 0)})" if small else ""
    return [
        root(
            "config.shm-too-small",
            sure,
            f"The file system of shared memory{told} has no room for a segment"
            f"{' of NCCL' if failed and failed[0].kind == 'nccl.shm-failed' else ''}.",
            [*said[:3], *small[:1]],
            excluded=(
                ("oom.host", "a shared segment is refused; nothing was killed for memory"),
                ("crash.storage-failed", "the path is that of shared memory"),
                ("crash.native-fault", "a bus error while shared memory is full is its effect"),
                ("hang.rank-died", "its own line says why it ended"),
                _NOT_A_CRASH,
            ),
        )
    ]


def _full(event: Event, policy: Policy) -> bool:
    total, used = event.number("total") or 0, event.number("used") or 0
    return total < policy.shm_small or used >= policy.shm_full * total


def _memlock(evidence: Evidence, policy: Policy) -> list[Finding]:
    refused = [
        e
        for e in evidence.lines.of("nccl.verbs-failed")
        if e.text("call").startswith(_MEMORY)
        and ("Cannot allocate memory" in e.text("message") or e.number("errno") == 12)
    ]
    if not refused:
        return []
    limits = evidence.lines.of("limit.memlock")
    small = [e for e in limits if (b := e.number("bytes")) is not None and b < policy.memlock_small]
    told = f" (the job's limit is {size(small[0].number('bytes') or 0)})" if small else ""
    return [
        root(
            "config.os-limits",
            "certain" if small else "likely",
            f"{refused[0].text('call')} cannot lock memory{told}: the limit of locked memory is "
            "too low.",
            [*refused[:3], *small[:1]],
            where="memlock",
            excluded=(
                ("oom.host", "memory is not exhausted; a limit refuses"),
                ("oom.comm-buffers", "a verbs call on host memory fails, not the GPU's allocator"),
                ("link.nic-degraded", "the port is not at fault"),
                _NOT_A_CRASH,
            ),
        )
    ]


def _limits(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    reached = evidence.lines.of("limit.reached")
    if not reached or not _ended_by(evidence, reached):
        return []
    what = reached[0].text("what")
    files = "open files" in what or "ancdata" in what
    return [
        root(
            "config.os-limits",
            "likely",
            f"A limit of the operating system was reached: {what[:80]}.",
            reached,
            where="open-files" if files else "processes",
            excluded=(_NOT_A_CRASH, ("oom.host", "memory is not exhausted; a limit refuses")),
        )
    ]


def _ended_by(evidence: Evidence, reached: list[Event]) -> bool:
    """Whether a rank's own exception is that refusal."""
    texts = [r.text for r in evidence.raised if r.kind.name not in ("peer", "timeout", "launcher")]
    return any(e.text("what")[:20] in t for e in reached for t in texts)


def _own_error(evidence: Evidence) -> bool:
    """Whether the program raised an error that speaks of neither CUDA, driver nor network."""
    return any(r.kind.name == "program" and not _SYSTEM.search(r.text) for r in evidence.raised)


def _arch(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    said = evidence.lines.of("nccl.arch")
    why = "nccl"
    if not said and _own_error(evidence):
        return []  # a warning about the GPU beside an error that has nothing to do with it
    if not said:
        found = evidence.lines.of("cuda.arch")
        said = [e for e in found if "not compatible" not in e.text("message")] or found
        driver = any("river" in e.text("message") for e in said)
        why = "driver" if driver else "torch-build"
    if not said:
        return []
    return [
        root(
            "config.unsupported-arch",
            "likely",
            {
                "nccl": "NCCL's kernels need more shared memory than this GPU has: this NCCL does "
                "not support it.",
                "driver": "The driver does not fit the CUDA runtime of this torch build.",
                "torch-build": "This torch build has no code for this GPU.",
            }[why],
            said,
            where=why,
            excluded=(
                _NOT_A_CRASH,
                ("crash.kernel-error", "no kernel ran"),
                ("hang.device-error", "no Xid is recorded"),
                ("config.nccl-mismatch", "it fails with one version everywhere"),
            ),
        )
    ]


def _fabric(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    failures = evidence.lines.of("nccl.cuda-failure")
    said = [
        *evidence.lines.of("cuda.not-initialized"),
        *(e for e in failures if e.number("code") == 802 or "not yet init" in e.text("message")),
    ]
    bound = [
        e
        for e in failures
        if e.number("code") == 401
        or "cannot be performed in the present state" in e.text("message")
    ]
    manager = evidence.lines.of("fabric.manager")
    if (not said and not bound) or evidence.lines.of("kernel.xid", "kernel.sxid"):
        return []
    return [
        root(
            "config.fabric-manager",
            "certain" if manager and said else "likely",
            "The NVSwitch fabric is not ready: CUDA answers "
            + ('802, "system not yet initialized".' if said else "401 when NCCL binds multicast."),
            [*(said or bound)[:3], *manager[:2]],
            where="not-running" if manager else None,
            excluded=(
                _NOT_A_CRASH,
                ("hang.device-error", "no Xid or SXid is recorded"),
                ("config.unsupported-arch", "the code is that of a fabric that is not ready"),
            ),
        )
    ]


def _imex(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    said = evidence.lines.of("nccl.mnnvl")
    denied = [
        e
        for e in evidence.lines.of("nccl.cuda-failure")
        if e.number("code") in (800, 999) or "not permitted" in e.text("message")
    ]
    cured = [
        e
        for e in evidence.lines.of("note.helps")
        if e.text("variable") == "NCCL_MNNVL_ENABLE" and e.fields.get("works")
    ]
    if not said and not cured:
        return []
    return [
        root(
            "config.imex",
            "likely",
            "Multi-node NVLink is there, but NCCL cannot use it: check IMEX and its channels.",
            [*said[:3], *denied[:1], *cured[:1]],
            where="imex-channel" if said else "partial-health",
            excluded=(_NOT_A_CRASH, ("crash.native-fault", "switching MNNVL off cures it")),
        )
    ]


def _efa(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    chosen = evidence.lines.of("nccl.ofi-provider")
    wrong = [e for e in chosen if not e.text("provider").startswith("efa")]
    if not wrong or _own_error(evidence) or len(wrong) < len({e.place for e in chosen}):
        return []
    return [
        root(
            "config.efa-provider",
            "likely",
            f"NCCL's OFI plugin runs over provider {wrong[0].text('provider')} instead of efa.",
            wrong,
            excluded=(
                ("link.socket-fallback", "the OFI plugin is in use and chose the provider"),
                ("config.shm-too-small", "no shared memory was refused"),
                _NOT_A_CRASH,
            ),
        )
    ]
