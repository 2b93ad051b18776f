"""Which category filled a device: the oom.* causes that one message alone does not tell apart.

In: the message's sum, the frames in which it was raised, pids of the job, sizes that the job
printed, memory over steps. Out: the first cause, narrow before broad, whose decisive fact is there;
None when none is. Pure functions over Evidence.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.rules import memory_growth
from playbooks.rules.common import frames
from playbooks.words import count, size

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.facts import Raised
    from playbooks.finding import Finding
    from playbooks.policy import Policy
    from playbooks.rules.memory import Message

_UNITS = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
_OTHER = re.compile(r"Process (\d{1,9}) has ([\d.]+) ([KMGT]iB|B|bytes) memory in use")
_ALLOWED = re.compile(r"([\d.]+) ([KMGT]iB) allowed")
_STATE_DICT = re.compile(
    r"state_dict|full_tensor|summon_full_params|_unshard_params|16bit|consolidat|"
    r"_gather_state|rank0_only|full_params",
    re.IGNORECASE,
)
_SAVES = re.compile(
    r"save|export|checkpoint|load|resume|state_dict|consolidat|push_to_hub", re.IGNORECASE
)
_EVALUATION = re.compile(
    r"evaluat|evaluation_loop|validat|prediction_(?:step|loop)|\bpredict|generate|\beval"
)
_LOSS = re.compile(r"entropy|softmax|lm_head|logit|loss|head\b|log_prob", re.IGNORECASE)
_STATES = re.compile(
    r"_init_group|_init_state|initialize_optimizer|_initialize_state|init_optimizer|_setup_for_real"
)
_BUILD = re.compile(
    r"^(?:to|cuda|_apply|convert|half|bfloat16|float|to_empty|materialize\w*|reset_parameters|"
    r"_sync_module_states|build_model|get_model|from_pretrained|_ddp_init_helper|DistributedDataParallel|"
    r"_move_\w+|dispatch_model|_load_state_dict_into_\w+|place_model)$"
)
_PINS = re.compile(r"pin_memory|pinned|cudaHostAlloc|cudaHostRegister|cudaMallocHost|page.?locked")
_COLLECTIVE = re.compile(
    r"all_gather|allgather|reduce_scatter|all_to_all|allreduce_bucket|alltoall"
)


def decide(
    evidence: Evidence, policy: Policy, base: Finding, message: Message, first: Raised, asked: str
) -> Finding | None:
    """The cause that a decisive fact names; None when the rest of the arithmetic has to."""
    return _limit(base, message, first, asked) or _other_processes(
        evidence, policy, base, message, first, asked
    )


def decide_full(
    evidence: Evidence, policy: Policy, base: Finding, message: Message, first: Raised, asked: str
) -> Finding | None:
    """Causes of a device that this process itself fills."""
    return (
        _evaluation(evidence, base, first, asked)
        or memory_growth.growing(evidence, policy, base, asked)
        or _full_state(evidence, base, first, asked)
        or _logits(evidence, policy, base, message, first, asked)
        or _outside(policy, base, message, asked)
        or _states(evidence, policy, base, message, first, asked)
        or _collective(base, first, asked)
    )


def _bytes(value: str, unit: str) -> int:
    return int(float(value) * 1024 ** _UNITS.get(unit, 0))


def _limit(base: Finding, message: Message, first: Raised, asked: str) -> Finding | None:
    """A fraction that the program set, printed as "N GiB allowed"."""
    found = _ALLOWED.search(first.text)
    fraction = "per_process_memory_fraction" in first.text
    allowed = _bytes(*found.groups()) if found else None
    low = allowed is not None and message.total is not None and allowed < 0.98 * message.total
    if not low and not (fraction and allowed is None):
        return None
    if message.free is not None and message.request and message.free < message.request:
        return None
    return base.but(
        cause="oom.artificial-limit",
        confidence="likely",
        where="memory-fraction",
        summary=f"{asked} and was refused by the process's own memory limit"
        f"{f' of {size(allowed)}' if allowed else ''}.",
    )


def _other_processes(
    evidence: Evidence, policy: Policy, base: Finding, message: Message, first: Raised, asked: str
) -> Finding | None:
    """Memory of other pids on the device: ranks of this job, or strangers."""
    found = {int(p): _bytes(v, u) for p, v, u in _OTHER.findall(first.text)}
    own_pids = evidence.story.pids
    rank = first.rank
    found = {p: b for p, b in found.items() if rank is None or own_pids.get(p, -1) != rank}
    held = sum(found.values())
    job = bool(found) and all(p in own_pids for p in found)
    would_fit = held + (message.free or 0) >= (message.request or 0)
    if not found or not message.total:
        return None
    if held < policy.foreign_share * message.total and not (job and would_fit):
        return None
    listed = ", ".join(f"{p} {size(b)}" for p, b in list(found.items())[:4])
    ours = [p for p in found if p in own_pids]
    text = f"{asked}; other processes hold {size(held)} of its {size(message.total)} ({listed})."
    if ours and sum(found[p] for p in ours) * 2 >= held:
        loads = any("load" in f[2] for f in frames(first.traceback))
        return base.but(
            cause="oom.all-ranks-gpu0",
            confidence="certain" if len(ours) == len(found) > 1 else "likely",
            where="load-without-map-location" if loads else "no-set-device",
            summary=f"{text[:-1]}, and {count(len(ours), 'of them')} are ranks of this job.",
            excluded=(("oom.other-process", "the pids are ranks of this job"),),
        )
    sizes = sorted(found.values())
    alike = len(sizes) > 1 and sizes[-1] <= 1.5 * sizes[0]
    if alike and not own_pids:
        return None  # as many equal processes as ranks could be this job's own
    known = [p for p, r in own_pids.items() if r is not None] or list(own_pids)
    return base.but(
        cause="oom.other-process",
        confidence="certain" if known else "likely",
        summary=f"{text[:-1]}, none of which is a rank of this job.",
        formula=f"others {size(held)} of total {size(message.total)}",
        excluded=(
            ("oom.activations", "this process holds far less than the card"),
            ("oom.all-ranks-gpu0", "the pid does not belong to this job"),
        ),
    )


def pinned(base: Finding, first: Raised, asked: str) -> Finding | None:
    """Page-locking of host memory was refused: the frames or the call say so, not the device."""
    inner = " ".join(name for _file, _line, name in frames(first.traceback)[-3:])
    if not _PINS.search(f"{inner} {first.text}") or "Tried to allocate" in first.text:
        return None
    return base.but(
        cause="oom.pinned-host",
        confidence="likely",
        summary=f"{asked} of page-locked host memory: the call that failed pins a buffer.",
        excluded=(
            ("oom.host", "no process was killed: the call returned an error"),
            ("oom.artificial-limit", "no device memory was asked for"),
        ),
    )


def _outside(policy: Policy, base: Finding, message: Message, asked: str) -> Finding | None:
    """This process holds far more beside torch's allocator than context and libraries need."""
    held, total = message.outside, message.total
    if held is None or not total or held < max(policy.outside_bytes, policy.outside_share * total):
        return None
    return base.but(
        cause="oom.comm-buffers",
        confidence="likely",
        where="buffers-too-large",
        summary=f"{asked}; this process holds {size(held)} of {size(total)} beside torch's "
        "allocator, where communicators keep their buffers.",
        formula=f"in use {size(message.in_use or 0)} - allocated {size(message.allocated or 0)} - "
        f"reserved but unallocated {size(message.idle or 0)} = {size(held)}",
        excluded=(
            ("oom.other-process", "the memory belongs to this process"),
            ("oom.activations", "what torch allocated leaves room"),
        ),
    )


def _names(first: Raised) -> list[str]:
    return [name for _file, _line, name in frames(first.traceback)]


def _trained(evidence: Evidence, least: int = 2) -> bool:
    """Whether training steps were done before."""
    return len({fields.get("step") for _row, fields in evidence.story.of("train.step")}) >= least


def _full_state(evidence: Evidence, base: Finding, first: Raised, asked: str) -> Finding | None:
    names = _names(first)
    if not any(_STATE_DICT.search(n) for n in names) or "load" in names[-1:]:
        return None
    gathers = any(
        re.search(r"full_tensor|summon_full|16bit|unshard|gather|get_\w*state_dict", n)
        for n in names
    )
    saves = any(_SAVES.search(n) for n in names)
    if not saves or not (gathers or _trained(evidence)):
        return None
    return base.but(
        cause="oom.full-state-dict",
        confidence="likely",
        summary=f"{asked} while a whole state dict was put together on the device"
        f"{', though its training steps fit' if _trained(evidence) else ''}.",
        excluded=(
            ("oom.model-states", "sharded training steps fit"),
            ("oom.activations", "no training step was running"),
        ),
    )


def _sizes(evidence: Evidence) -> dict[str, set[float]]:
    """Sizes that the job printed or was configured with; several values of one name are kept."""
    out: dict[str, set[float]] = {}
    for _row, fields in evidence.story.of("train.size"):
        for name, value in fields.items():
            if isinstance(value, int | float) and name != "local_rank":
                out.setdefault(name, set()).add(float(value))
    for _row, fields in evidence.story.of("config.value"):
        if isinstance(fields.get("value"), int | float):
            out.setdefault(str(fields.get("name")), set()).add(float(fields["value"]))
    return out


def _logits(
    evidence: Evidence, policy: Policy, base: Finding, message: Message, first: Raised, asked: str
) -> Finding | None:
    """The request is B*S*V times 2 or 4 bytes (over tp), in a training step."""
    names = _names(first)
    if not message.request or any(_EVALUATION.search(n) for n in names):
        return None
    known = _sizes(evidence)
    for batch in known.get("micro_batch", ()):
        for length in known.get("sequence", ()):
            for vocab in known.get("vocab", ()):
                for width in (4, 2):
                    for tp in {1.0, *known.get("tp", ())}:
                        need = batch * length * vocab * width / max(tp, 1)
                        if need > 0 and abs(message.request / need - 1) <= policy.logits_rounding:
                            over = f" / {tp:.0f}" if tp > 1 else ""
                            formula = (
                                f"{batch:.0f} x {length:.0f} x {vocab:.0f} x {width} B{over} = "
                                f"{size(need)}"
                            )
                            return base.but(
                                cause="oom.logits",
                                confidence="likely",
                                summary=f"{asked}, the size of the logits: {formula}.",
                                formula=formula,
                                excluded=(("oom.activations", "size and frame match the logits"),),
                            )
    return None


def _evaluation(evidence: Evidence, base: Finding, first: Raised, asked: str) -> Finding | None:
    names = _names(first)
    if not any(_EVALUATION.search(n) for n in names) or "backward" in names:
        return None
    if not _trained(evidence):
        return None
    return base.but(
        cause="oom.evaluation",
        confidence="likely",
        summary=f"{asked} in evaluation or generation, while its training steps fit.",
        excluded=(("oom.activations", "training with the same job fits"),),
    )


def _states(
    evidence: Evidence, policy: Policy, base: Finding, message: Message, first: Raised, asked: str
) -> Finding | None:
    """In the building of the model, or when the optimizer makes its states for the first time."""
    names = _names(first)
    making = any(_STATES.search(n) for n in names)
    building = bool(names) and any(_BUILD.match(n) for n in names[-5:]) and "forward" not in names
    if not (making or building) or _trained(evidence, 3) or "load" in names:
        return None
    own, total = message.allocated, message.total
    if not own or not total or own < policy.states_share * total:
        return None
    parameters = max(_sizes(evidence).get("parameters", {0.0}))
    need = (
        f", of {size(parameters * 16)} that {parameters / 1e9:.3g} B parameters need unsharded"
        if parameters
        else ""
    )
    when = "when the optimizer made its states" if making else "while the model was built or moved"
    return base.but(
        cause="oom.model-states",
        confidence="likely",
        summary=f"{asked} {when}; this process holds {size(own)} of {size(total)}{need}.",
        formula=f"{parameters:.0f} x 16 B = {size(parameters * 16)}" if parameters else None,
        excluded=(
            ("oom.activations", "no forward or backward was running"),
            ("oom.fragmentation", "little is reserved without being allocated"),
        ),
    )


def _collective(base: Finding, first: Raised, asked: str) -> Finding | None:
    inner = frames(first.traceback)[-4:]
    if not any(_COLLECTIVE.search(name) for _f, _l, name in inner):
        return None
    place = next(name for _f, _l, name in reversed(inner) if _COLLECTIVE.search(name))
    return base.but(
        cause="oom.comm-buffers",
        confidence="possible",
        where="buffers-too-large",
        summary=f"{asked} for the buffer of {place}.",
    )
