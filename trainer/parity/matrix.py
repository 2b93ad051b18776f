"""The layouts that must be equal to one process: every axis alone, every pair, and some threes.

Each entry is what is told beside the model; its ranks are the product of its axes, at most 8.
"""

from __future__ import annotations

_PARTS: dict[str, tuple[str, ...]] = {
    "dp": ("parallel.dp=2",),
    "zero1": ("parallel.dp=2", "parallel.zero=1"),
    "zero2": ("parallel.dp=2", "parallel.zero=2"),
    "zero3": ("parallel.dp=2", "parallel.zero=3"),
    "tp": ("parallel.tp=2",),
    "tp+sp": ("parallel.tp=2", "parallel.sp=true"),
    "pp": ("parallel.pp=2",),
    "gpipe": ("parallel.pp=2", "parallel.schedule=gpipe"),
    "naive": ("parallel.pp=2", "parallel.schedule=naive"),
    "interleaved": ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual=2"),
    "ring": ("parallel.cp=2", "parallel.cp_form=ring"),
    "all-gather": ("parallel.cp=2", "parallel.cp_form=all-gather"),
    "zero-bubble": ("parallel.pp=2", "parallel.schedule=zero-bubble"),
    "recomputed": ("memory.checkpoint=full",),
    "selective": ("memory.checkpoint=selective",),
    "by stage": ("memory.checkpoint=selective,every-2",),
    "told": ("parallel.pp=2", "parallel.split=1,3"),
    "measured": ("parallel.split=measured",),
    "dropout": ("model.dropout=0.25",),
    "hybrid1": ("parallel.dp=4", "parallel.zero=1", "parallel.replicate=2"),
    "hybrid2": ("parallel.dp=4", "parallel.zero=2", "parallel.replicate=2"),
    "hybrid3": ("parallel.dp=4", "parallel.zero=3", "parallel.replicate=2"),
    "hybrid over cp": ("parallel.dp=2", "parallel.cp=2", "parallel.zero=3", "parallel.replicate=2"),
    "update on host": ("memory.offload=optimizer",),
    "shares on host": ("memory.offload=parameters", "parallel.zero=3"),
    "fetched late": ("parallel.prefetch=0",),
    "fetched early": ("parallel.prefetch=2",),
    "documents": ("data.documents=true", "data.end=10"),
    "ep": ("parallel.dp=2", "parallel.ep=2", "model.experts=4"),
    "ep+capacity": ("parallel.dp=2", "parallel.ep=2", "model.experts=4", "model.capacity=1"),
    "ep4": ("parallel.ep=4",),
}
_KINDS = {
    "data": ("dp", "zero1", "zero2", "zero3"),
    "tensor": ("tp", "tp+sp"),
    "stages": ("pp", "gpipe", "naive", "interleaved", "zero-bubble"),
    "context": ("ring", "all-gather"),
    "memory": ("recomputed",),
    "masks": ("documents",),
}
_NO_AXIS = {"memory", "masks"}
"""Kinds that alone are one process."""
_EXPERTS = ("ep", "ep+capacity")
"""With another kind of data parallelism they stand on dp4, so that experts have replicas too."""
_THREES = (
    ("dp", "tp", "pp"),
    ("dp", "tp+sp", "ring"),
    ("pp", "ring", "tp"),
    ("zero3", "tp+sp", "ring"),
    ("zero3", "tp+sp", "all-gather"),
    ("zero2", "interleaved", "tp+sp"),
    ("zero1", "gpipe", "all-gather"),
    ("zero3", "interleaved", "ring", "recomputed"),
    ("dp", "tp+sp", "ring", "documents"),
    ("pp", "all-gather", "tp", "documents"),
    ("zero3", "interleaved", "ring", "recomputed", "documents"),
    ("cp4", "documents"),
    ("all-gather", "selective"),
    ("ring", "pp", "selective", "documents"),
    ("ep", "tp", "dp4"),
    ("ep+capacity", "pp", "dp4"),
    ("ep+capacity", "tp+sp", "ring"),
    ("zero3", "ep+capacity", "tp+sp", "dp4"),
    ("zero2", "ep", "interleaved", "recomputed", "dp4"),
    ("zero1", "ep", "gpipe", "all-gather"),
    ("ep", "dp4", "ep4"),
    ("ep+capacity", "ring", "ep4"),
)


_SHARING = (
    ("hybrid1",),
    ("hybrid2",),
    ("hybrid3",),
    ("hybrid over cp",),
    ("hybrid1", "tp+sp"),
    ("hybrid2", "interleaved"),
    ("hybrid3", "pp"),
    ("hybrid3", "tp"),
    ("hybrid over cp", "tp+sp"),
    ("update on host",),
    ("dp", "update on host"),
    ("zero1", "update on host", "tp+sp"),
    ("zero2", "update on host", "pp"),
    ("zero3", "update on host", "ring"),
    ("hybrid2", "update on host"),
    ("shares on host",),
    ("dp", "shares on host", "tp+sp"),
    ("dp", "shares on host", "interleaved", "recomputed"),
    ("hybrid3", "shares on host", "pp"),
    ("ep", "hybrid1", "update on host"),
    ("ep", "hybrid2", "tp"),
    ("ep", "hybrid3", "shares on host"),
    ("dp", "shares on host", "zero-bubble", "fetched early"),
    ("hybrid2", "zero-bubble", "update on host"),
    ("zero3", "fetched late"),
    ("zero3", "fetched early"),
    ("zero3", "fetched early", "interleaved", "recomputed"),
)
"""Forms of sharing, and what lives on the host."""
_STAGES = (
    ("zero3", "zero-bubble", "recomputed"),
    ("zero2", "zero-bubble", "tp+sp"),
    ("hybrid3", "zero-bubble", "by stage"),
    ("pp4", "zero-bubble in 4", "dropout"),
    ("selective",),
    ("zero3", "selective"),
    ("tp+sp", "selective"),
    ("ring", "selective", "documents"),
    ("dp", "zero-bubble", "selective"),
    ("told", "tp"),
    ("told", "zero-bubble", "zero1", "by stage"),
    ("measured", "pp", "dp"),
    ("measured", "interleaved", "tp+sp"),
    ("measured", "zero-bubble", "ring"),
)
"""Splits, halves of backwards, and what stages keep."""
_DROPOUT = (
    ("dropout", "dp"),
    ("dropout", "zero3", "recomputed"),
    ("dropout", "tp"),
    ("dropout", "tp+sp", "selective"),
    ("dropout", "all-gather"),
    ("dropout", "ring", "tp+sp"),
    ("dropout", "interleaved", "dp", "recomputed"),
    ("dropout", "zero-bubble", "tp+sp"),
)
"""The same elements fall everywhere."""


def matrix() -> list[tuple[str, ...]]:
    """The settings of each layout, single ones first."""
    names: list[tuple[str, ...]] = [
        (one,) for kind, members in _KINDS.items() if kind not in _NO_AXIS for one in members
    ]
    kinds = list(_KINDS.values())
    names += [
        (one, other)
        for at, members in enumerate(kinds)
        for later in kinds[at + 1 :]
        for one in members
        for other in later
    ]  # fmt: skip
    names += [(one,) for one in _EXPERTS]
    names += [
        (one, other, *(["dp4"] if kind == "data" else []))
        for kind, members in _KINDS.items()
        for one in members
        for other in _EXPERTS
    ]
    names += [(f"{axis}4",) for axis in ("dp", "tp", "pp", "cp")]
    parts = _PARTS | {f"{axis}4": (f"parallel.{axis}=4",) for axis in ("dp", "tp", "pp", "cp")}
    parts["zero-bubble in 4"] = ("parallel.schedule=zero-bubble",)
    return [
        tuple(setting for one in each for setting in parts[one])
        for each in (*names, *_THREES, *_SHARING, *_STAGES, *_DROPOUT)
    ]
