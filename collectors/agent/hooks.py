"""What torch is asked to call us for: groups, forward, backward, optimizer, data.

Installed once, when torch has been imported, in any process that might turn out to be a rank; until
it is one, each hook is a test of one global. `current()` gives the agent, or None.
A forward is found at the outermost module: hooks for all modules run during the first steps only
(and again every `_LOOK_EVERY` steps, for new models), then only the models found carry one.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from . import torch_compat

if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent

_LOOK_STEPS = 2
"""Steps during which every module call is looked at, to find the outermost ones."""
_LOOK_EVERY = 50
"""Every so many steps, one step of looking again."""


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
    _Forward(torch, current).look()


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
    slot = agent.recorder.auto_phase("data")
    try:
        return call()
    finally:
        agent.recorder.phase_end(slot)


def _optimizer(current: Callable[[], Agent | None]) -> None:
    open_slots: list[int] = []

    def before(_optimizer: Any, _args: Any, _kw: Any) -> None:
        agent = current()
        if agent is not None and not agent.recorder.off:
            open_slots.append(agent.recorder.auto_phase("optimizer"))

    def after(optimizer: Any, _args: Any, _kw: Any) -> None:
        agent = current()
        if agent is not None and open_slots:
            agent.recorder.phase_end(open_slots.pop())
            agent.recorder.optimizer_done(id(optimizer))

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
        slot = agent.recorder.auto_phase("backward")
        try:
            return original(*args, **kw)
        finally:
            agent.recorder.phase_end(slot)

    torch.autograd.backward = backward


class _Forward:
    """Finds the outermost modules and times them."""

    def __init__(self, torch: Any, current: Callable[[], Agent | None]) -> None:
        self._torch = torch
        self._modules = torch.nn.modules.module
        self._current = current
        self._looking: list[Any] = []
        self._known: set[int] = set()
        self._inside: list[tuple[Any, int]] = []
        self._until = _LOOK_STEPS

    def look(self) -> None:
        """Watch every module call for a while."""
        if not self._looking:
            self._looking = [
                self._modules.register_module_forward_pre_hook(self._before),
                self._modules.register_module_forward_hook(self._after, always_call=True),
            ]

    def _stop_looking(self) -> None:
        for handle in self._looking:
            handle.remove()
        self._looking = []

    def _found(self, module: Any) -> None:
        """An outermost module: it gets hooks of its own."""
        if id(module) not in self._known:
            self._known.add(id(module))
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: Any, _inputs: Any) -> None:
        if self._inside:
            return
        agent = self._current()
        if agent is None:
            return
        if agent.recorder.off or agent.recorder.explicit:
            self._stop_looking()
            return
        compiler = getattr(self._torch, "compiler", None)
        if compiler is not None and compiler.is_compiling():
            return
        evaluating = not module.training and not self._torch.is_grad_enabled()
        slot = agent.recorder.auto_phase("evaluation" if evaluating else "forward")
        if slot < 0:
            return
        self._inside.append((module, slot))
        step = agent.recorder.current
        if self._looking and step >= self._until:
            self._stop_looking()
        elif not self._looking and step >= self._until + _LOOK_EVERY:
            self._until = step + 1
            self.look()

    def _after(self, module: Any, _inputs: Any, _output: Any) -> None:
        if not self._inside or self._inside[-1][0] is not module:
            return
        _module, slot = self._inside.pop()
        agent = self._current()
        if agent is not None:
            agent.recorder.phase_end(slot)
            if self._looking:
                self._found(module)
