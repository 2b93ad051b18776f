"""What torch is asked to call us for: groups, backward, optimizer, data.

Installed once, when torch has been imported, in any process that might turn out to be a rank; until
it is one, each hook is a test of one global. `current()` gives the agent, or None. Nothing is hung
on the user's modules. What fails in a hook turns the agent off and never reaches the program.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from . import torch_compat

if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent


def _begin_phase(agent: Agent, name: str) -> int:
    try:
        return agent.recorder.auto_phase(name)
    except Exception as why:  # noqa: BLE001  never into the job
        agent.turn_off(why)
        return -1


def _end_phase(agent: Agent, slot: int) -> None:
    try:
        agent.recorder.phase_end(slot)
    except Exception as why:  # noqa: BLE001  never into the job
        agent.turn_off(why)


def install(
    torch: Any,
    *,
    rank_of_group: Callable[[Any, int, int], None],
    rank_alone: Callable[[Any], None],
    current: Callable[[], Agent | None],
) -> None:
    """Put the hooks in; `rank_*` are told when the process turns out to be a rank."""

    def made(group: Any, ranks: list[int]) -> None:
        if current() is None:
            rank_of_group(torch, ranks[group.rank()], len(ranks))
        agent = current()
        if agent is not None:
            agent.ledger.watch(group, ranks)

    if torch.distributed.is_available():
        torch_compat.on_new_group(torch, made)
        torch_compat.wrap_wait(
            torch, functools.partial(_claim, current), functools.partial(_waited, current)
        )
        if not torch_compat.has_group_hooks(torch):
            torch_compat.wrap_methods(
                torch, functools.partial(_begin, current), functools.partial(_issued, current)
            )
    torch_compat.wrap_spawn(lambda error: _spawned_failed(current, error))
    torch_compat.wrap_data(torch, functools.partial(_data, current))
    _optimizer(current)
    _backward(torch, rank_alone, current)


def _claim(current: Callable[[], Agent | None], work: Any) -> Any:
    agent = current()
    return None if agent is None else agent.ledger.waiting.pop(id(work), None)


def _waited(
    current: Callable[[], Agent | None], claimed: Any, begin: int, end: int, failed: bool
) -> None:
    agent = current()
    if agent is not None:
        agent.ledger.waited(claimed, begin, end, failed=failed)


def _begin(
    current: Callable[[], Agent | None], group: Any, op: str, inputs: Any, outputs: Any, root: int
) -> int:
    agent = current()
    if agent is None or agent.recorder.off:
        return -1
    one = agent.ledger.group_of(group)
    return agent.ledger.begin(one, op, inputs, outputs, root)


def _issued(
    current: Callable[[], Agent | None], slot: int, work: Any, waited: bool, device: bool
) -> None:
    agent = current()
    if agent is not None and slot >= 0:
        agent.ledger.issued(slot, work, waited=waited, device=device)


def _spawned_failed(current: Callable[[], Agent | None], error: BaseException) -> None:
    agent = current()
    if agent is not None:
        agent.failed(error)


def _data(current: Callable[[], Agent | None], call: Callable[[], Any]) -> Any:
    agent = current()
    if agent is None or agent.recorder.off:
        return call()
    slot = _begin_phase(agent, "data")
    try:
        return call()
    finally:
        _end_phase(agent, slot)


def _optimizer(current: Callable[[], Agent | None]) -> None:
    open_slots: list[int] = []

    def before(_optimizer: Any, _args: Any, _kw: Any) -> None:
        agent = current()
        if agent is not None and not agent.recorder.off:
            open_slots.append(_begin_phase(agent, "optimizer"))

    def after(optimizer: Any, _args: Any, _kw: Any) -> None:
        agent = current()
        if agent is not None and open_slots:
            _end_phase(agent, open_slots.pop())
            try:
                agent.recorder.optimizer_done(id(optimizer))
            except Exception as why:  # noqa: BLE001  never into the job
                agent.turn_off(why)

    # torch.optim hides its module `optimizer` behind a name it deletes.
    optimizer = importlib.import_module("torch.optim.optimizer")
    optimizer.register_optimizer_step_pre_hook(before)
    optimizer.register_optimizer_step_post_hook(after)


def _backward(
    torch: Any, rank_alone: Callable[[Any], None], current: Callable[[], Agent | None]
) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kw: Any) -> Any:
        agent = current()
        if agent is None:
            rank_alone(torch)
            agent = current()
        if agent is None or agent.recorder.off:
            return original(*args, **kw)
        slot = _begin_phase(agent, "backward")
        try:
            return original(*args, **kw)
        finally:
            _end_phase(agent, slot)

    torch.autograd.backward = backward
