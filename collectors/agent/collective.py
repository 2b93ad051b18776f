"""The ledger: every collective and point-to-point operation of every group of one rank.

Each operation is one record, written when the host issues it (so that what never ends is seen) and
completed when the backend says so. `seq` counts within a group, in the order of issue, which all
members share; point-to-point operations count within (group, direction, peer), so that the k-th
send from a to b is the k-th receive of b from a.
Completion: where Python waits at once (async_op=False) that wait tells; else gloo calls back
through the work's future, and CUDA backends are asked by a side thread, since their futures are
"done" as soon as the operation is enqueued. It never waits, never syncs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from . import flight, torch_compat
from .flight import now

if TYPE_CHECKING:
    from collections.abc import Callable

    from .recorder import Recorder

_OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "split": "split_group",
}
"""c10d's hook words to the words of torch.distributed, where they differ."""
_P2P = ("send", "recv")
_POLL_S = 0.002
"""How often pending device operations are asked; the error of their completion times."""
_MOST_PENDING = 4096
_MOST_WAITING = 256
"""Works that are held for a wait() that may come; each may hold its tensors alive."""


class _Group:
    """One watched process group."""

    __slots__ = ("counts", "inflight", "number", "ranks", "seq", "slots")

    def __init__(self, number: int, ranks: list[int]) -> None:
        self.number = number
        self.ranks = ranks
        self.seq = 0
        self.counts: dict[tuple[str, int], int] = {}
        self.inflight: dict[int, tuple[int, bool, bool]] = {}
        """op_id -> (slot, whether its wait tells of its end, whether it runs on a device)."""


class Ledger:
    """Writes the collectives of one rank."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._writer = recorder.writer
        self._torch = torch
        self._groups: dict[int, _Group] = {}
        self._known: dict[Any, tuple[int, int, int, int, int]] = {}
        self.waiting: dict[int, tuple[int, Any, bool]] = {}
        """id(work) -> (slot, work, whether its wait tells of its end); holds the work, so that the
        id stays its own."""
        self._pending: deque[tuple[int, Any]] = deque()
        self._poller: threading.Thread | None = None
        self._ops: dict[Any, str] = {}

    # --- groups -----------------------------------------------------------------------------

    def watch(self, group: Any, ranks: list[int]) -> None:
        """A process group came into being."""
        try:
            one = self._add(group, ranks)
            if torch_compat.has_group_hooks(self._torch):
                torch_compat.hook_group(group, *self._hooks(one))
        except Exception as why:  # noqa: BLE001  never into the job
            self._fail(why)

    def _add(self, group: Any, ranks: list[int]) -> _Group:
        one = _Group(len(self._groups) + 1, ranks)
        self._groups[id(group)] = one
        desc = getattr(group, "group_desc", "") or ""
        backend = group.name() if callable(getattr(group, "name", None)) else ""
        self._writer.note(
            g=one.number,
            name=str(group.group_name),
            desc="" if desc == "undefined" else str(desc),
            ranks=ranks,
            backend=str(backend),
        )
        return one

    def group_of(self, group: Any) -> _Group:
        """The record of a group that torch handed out; for the wrapped methods."""
        one = self._groups.get(id(group))
        return one if one is not None else self._add(group, list(range(group.size())))

    # --- operations -------------------------------------------------------------------------

    def _describe(self, op: str, inputs: Any, outputs: Any) -> tuple[int, int, int, int, int]:
        """(name, dtype, shape, bytes in, bytes out), interned; cheap for what repeats."""
        one = inputs[0] if inputs else (outputs[0] if outputs else None)
        if one is None:
            key: Any = op
        else:
            last = outputs[-1].shape if outputs else None
            key = (op, one.shape, one.dtype, len(inputs), len(outputs), last)
            if len(inputs) > 1 or len(outputs) > 1:
                key = (*key, *(t.shape for t in inputs), *(t.shape for t in outputs))
        known = self._known.get(key)
        if known is None:
            name = self._writer.name
            if one is None:
                known = (name(op), 0, 0, 0, 0)
            else:
                many = len(inputs or outputs)
                shape = str(list(one.shape)) + (f" x{many}" if many > 1 else "")
                known = (
                    name(op),
                    name(str(one.dtype).removeprefix("torch.")),
                    name(shape),
                    sum(t.numel() * t.element_size() for t in inputs),
                    # In-place operations name no outputs: they receive where they gave.
                    sum(t.numel() * t.element_size() for t in outputs or inputs),
                )
            if len(self._known) < _MOST_PENDING:
                self._known[key] = known
        return known

    def begin(self, one: _Group, op: str, inputs: Any, outputs: Any, root: int) -> int:
        """Record that the host issues an operation; returns its slot."""
        number, dtype, shape, given, received = self._describe(op, inputs, outputs)
        peer = one.ranks[root] if 0 <= root < len(one.ranks) else -1
        if op in _P2P:
            key = (op, peer)
            seq = one.counts[key] = one.counts.get(key, 0) + 1
            given, received = (given, 0) if op == "send" else (0, received)
        else:
            seq = one.seq = one.seq + 1
        return self._writer.put(
            flight.COLLECTIVE,
            number,
            now(),
            group=one.number,
            dtype=dtype,
            a=given,
            b=received,
            seq=seq,
            step=self._recorder.current,
            shape=shape,
            peer=peer,
        )

    def issued(self, slot: int, work: Any, *, waited: bool, device: bool) -> None:
        """The backend accepted it: arrange to learn of its completion. `waited`: the program's
        own wait() will tell."""
        if work is None:
            self._writer.finish(slot, now())
            return
        self.waiting[id(work)] = (slot, work, waited and not device)
        if device:
            self._ask_later(slot, work)
        elif not waited:
            work.get_future().add_done_callback(lambda future: self._done(slot, work, future))
        if len(self.waiting) > _MOST_WAITING:
            self.waiting.pop(next(iter(self.waiting)), None)

    def _hooks(self, one: _Group) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
        """The two hooks of a group. They run for every operation of the job, hence the locals."""
        recorder, ops, inflight, begin = self._recorder, self._ops, one.inflight, self.begin

        def pre(args: Any) -> None:
            if recorder.off:
                return
            try:
                name = args.name
                op = ops.get(name)
                if op is None:
                    word = str(name).rpartition(".")[2].lower()
                    op = ops[name] = _OPS.get(word, word)
                inputs, outputs = args.input_tensors, args.output_tensors
                first = inputs or outputs
                inflight[args.op_id] = (
                    begin(one, op, inputs, outputs, args.root),
                    # gloo's send and receive have no future: whoever issues them has to wait.
                    not args.async_op or op in _P2P,
                    bool(first) and first[0].is_cuda,
                )
            except Exception as why:  # noqa: BLE001  never into the job
                self._fail(why)

        def post(args: Any) -> None:
            known = inflight.pop(args.op_id, None)
            if known is None or recorder.off:
                return
            try:
                self.issued(known[0], args.work, waited=known[1], device=known[2])
            except Exception as why:  # noqa: BLE001  never into the job
                self._fail(why)

        return pre, post

    # --- completion -------------------------------------------------------------------------

    def _done(self, slot: int, work: Any, future: Any) -> None:
        end = now()
        try:
            state = flight.DONE
            try:
                future.value()
            except Exception:  # noqa: BLE001  whatever the backend failed with
                state = flight.FAILED
            self._writer.finish(slot, end, state)
            self.waiting.pop(id(work), None)
        except Exception as why:  # noqa: BLE001  a callback of the backend's own thread
            self._fail(why)

    def waited(self, claimed: tuple[int, Any, bool], begin: int, end: int, *, failed: bool) -> None:
        """Python code waited for an operation from `begin` to `end`."""
        slot, _work, ends = claimed
        if ends or failed:
            state = flight.FAILED if failed else flight.DONE
            self._writer.finish(slot, end, state, end - begin)
        else:
            self._writer.waited(slot, end - begin)

    def _ask_later(self, slot: int, work: Any) -> None:
        if len(self._pending) < _MOST_PENDING:
            self._pending.append((slot, work))
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll, name="diag-agent", daemon=True)
            self._poller.start()

    def _poll(self) -> None:
        while not self._recorder.off:
            time.sleep(_POLL_S)
            try:
                for _ in range(len(self._pending)):
                    slot, work = self._pending[0]
                    if not work.is_completed():
                        self._pending.rotate(-1)
                        continue
                    self._pending.popleft()
                    self.waiting.pop(id(work), None)
                    # A device backend that fails aborts the process: no state to ask for here.
                    self._writer.finish(slot, now())
            except Exception as why:  # noqa: BLE001  the thread ends, the job goes on
                self._fail(why)

    def _fail(self, why: Exception) -> None:
        self._recorder.off = True
        self._writer.note(problem=f"agent off: {type(why).__name__}: {why}"[:400])
