"""Everything that reaches into torch's private names, and nothing else does.

Tried on torch 2.11.0 and 2.14.1. Each function looks its feature up and says in its return
value whether it was there, so that an older or newer torch loses a column and not the job.

    what                                 since  without it
    ProcessGroup.register_pre/post_hook  2.14   Python-level methods are wrapped; users in C++
                                                (DDP) are not seen, and the log says so
    _new_process_group_helper            1.x    groups are not seen
    _BaseDataLoaderIter.__next__         1.x    no data phase
    torch.multiprocessing.spawn._wrap    1.x    an exception of a spawned rank is not recorded
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .flight import now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HOOK_ID = 0x64696167
"""Our id among a group's hooks ("diag" in ASCII), so as not to meet another tool's."""

_METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
"""Methods of ProcessGroup and the operation that each is, for torch without group hooks."""


def has_group_hooks(torch: Any) -> bool:
    """Whether a process group calls back for every collective, whoever issues it."""
    return hasattr(torch.distributed.ProcessGroup, "register_pre_hook")


def on_new_group(torch: Any, made: Callable[[Any, list[int]], None]) -> None:
    """Call `made(group, global ranks)` for each process group of this process, once made."""
    c10d = torch.distributed.distributed_c10d
    helper = c10d._new_process_group_helper

    @functools.wraps(helper)
    def new_group(group_size: int, group_rank: Any, ranks: list[int], *rest: Any, **kw: Any) -> Any:
        result = helper(group_size, group_rank, ranks, *rest, **kw)
        group = result[0] if isinstance(result, tuple) else result
        if isinstance(group, torch.distributed.ProcessGroup):
            made(group, list(ranks) or list(range(group_size)))
        return result

    c10d._new_process_group_helper = new_group
    split = getattr(torch.distributed.ProcessGroup, "split_group", None)
    if split is None:
        return

    @functools.wraps(split)
    def split_group(self: Any, ranks: list[int], *rest: Any, **kw: Any) -> Any:
        group = split(self, ranks, *rest, **kw)
        if group is not None:
            parent = torch.distributed.get_process_group_ranks(self)
            made(group, [parent[r] for r in ranks])
        return group

    torch.distributed.ProcessGroup.split_group = split_group


def hook_group(group: Any, pre: Callable[[Any], None], post: Callable[[Any], None]) -> None:
    """Register the official hooks on one group, until the interpreter ends.

    A group that outlives the interpreter (no destroy_process_group) would free our Python hooks
    from C++ after it: SIGSEGV at the exit of a healthy job. So they are taken off before.
    """
    group.register_pre_hook(_HOOK_ID, pre)
    group.register_post_hook(_HOOK_ID, post)
    atexit.register(_unhook, weakref.ref(group))


def _unhook(reference: Callable[[], Any]) -> None:
    group = reference()
    if group is not None:
        with contextlib.suppress(Exception):  # the job's exit is not the place to complain
            group.unregister_pre_hook(_HOOK_ID)
            group.unregister_post_hook(_HOOK_ID)


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "element_size"):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def wrap_methods(
    torch: Any, begin: Callable[..., int], issued: Callable[[int, Any, bool, bool], None]
) -> None:
    """For torch without group hooks: see what Python code asks of any group.

    `begin(group, op, inputs, outputs, root)` returns a slot; `issued(slot, work, waited,
    device)` follows, with whether the caller waits for the work at once, and where it runs.
    """
    kind = torch.distributed.ProcessGroup

    def wrap(name: str, op: str) -> None:
        method = getattr(kind, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kw: Any) -> Any:
            inside = op in ("all_reduce", "broadcast", "reduce", "send", "recv", "barrier")
            inputs = list(_tensors(args[0 if inside else 1])) if len(args) > (not inside) else []
            outputs = [] if inside else list(_tensors(args[0]))
            root = args[1] if op in ("send", "recv") and len(args) > 1 else -1
            slot = begin(self, op, inputs, outputs, root)
            work = method(self, *args, **kw)
            options = kw.get("opts", args[-1] if args else None)
            waited = op in ("send", "recv") or not getattr(options, "asyncOp", True)
            issued(slot, work, waited, any(t.is_cuda for t in (*inputs, *outputs)))
            return work

        setattr(kind, name, call)

    for name, op in _METHODS.items():
        wrap(name, op)


def wrap_wait(
    torch: Any, claim: Callable[[Any], Any], waited: Callable[[Any, int, int, bool], None]
) -> None:
    """Time each work.wait() that Python code calls: where `claim(work)` is not None, call
    `waited(claimed, begin, end, failed)` after it; times are those of `flight.now`."""
    work_class = torch.distributed.Work
    original = work_class.wait

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kw: Any) -> Any:
        claimed = claim(self)
        if claimed is None:
            return original(self, *args, **kw)
        begin = now()
        try:
            result = original(self, *args, **kw)
        except BaseException:
            waited(claimed, begin, now(), True)
            raise
        waited(claimed, begin, now(), False)
        return result

    work_class.wait = wait


def wrap_data(torch: Any, around: Callable[[Callable[[], Any]], Any]) -> bool:
    """Let `around(call)` stand where a DataLoader's iterator is made or asked for a batch."""
    loader = sys.modules.get("torch.utils.data.dataloader")
    iterator = getattr(loader, "_BaseDataLoaderIter", None)
    if iterator is None:
        return False
    following, making = iterator.__next__, torch.utils.data.DataLoader.__iter__

    @functools.wraps(following)
    def next_batch(self: Any) -> Any:
        return around(functools.partial(following, self))

    @functools.wraps(making)
    def make(self: Any) -> Any:
        return around(functools.partial(making, self))

    iterator.__next__ = next_batch
    torch.utils.data.DataLoader.__iter__ = make
    return True


def wrap_spawn(failed: Callable[[BaseException], None]) -> bool:
    """Call `failed(error)` when a function run by torch.multiprocessing.spawn raises."""
    import importlib

    spawn = importlib.import_module("torch.multiprocessing.spawn")
    original = getattr(spawn, "_wrap", None)
    if original is None:
        return False

    @functools.wraps(original)
    def wrapped(fn: Any, i: int, args: Any, error: Any) -> Any:
        @functools.wraps(fn)
        def watched(*inner: Any) -> Any:
            try:
                return fn(*inner)
            except Exception as why:
                failed(why)
                raise

        return original(watched, i, args, error)

    spawn._wrap = wrapped  # type: ignore[attr-defined]  # looked up above
    return True
