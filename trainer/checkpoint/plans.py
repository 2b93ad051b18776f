"""What a rank writes and reads, as torch's distributed checkpoint (DCP) wants it told.

In: entries, each a flat tensor of this rank and its place in a whole one. Out: planners for DCP.
On the disk stand blocks of whole parameters, whatever layout wrote them, so that any other layout,
and torch's own tools, can read them: a stretch that ZeRO cut is told as the few blocks that make it
up (place.py). What several ranks hold is written by one, chosen by DCP so that all write alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed.checkpoint.planner import ReadItem

    from trainer.place import Block, Place

_MOST_BYTES = 1 << 24
"""Of a block in a file. Whoever needs a part of a block reads it all, so blocks are small; each
costs about a kibibyte and 50 us beside its values, so they aren't smaller."""


@dataclass(frozen=True)
class Entry:
    """A tensor of this rank and where it belongs."""

    key: str
    """Of the whole tensor in the checkpoint."""
    place: Place
    values: Tensor
    """Flat; written from and read into."""


class SavePlanner(DefaultSavePlanner):
    """Plans once, since a layout never changes; each save then brings the values of its moment."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._now: dict[MetadataIndex, Tensor] = {}
        self._staged: dict[MetadataIndex, Tensor] = {}

    def local(self, entries: Sequence[Entry]) -> SavePlan:
        """All that this rank holds."""
        return SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(entry.key, block.offset),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(block),
                        properties=TensorProperties(dtype=entry.values.dtype),
                        size=torch.Size(entry.place.shape),
                    ),
                )
                for entry in entries
                for block in _blocks(entry)
            ]
        )

    def bring(self, entries: Sequence[Entry], plan: SavePlan, *, copy: bool) -> None:
        """The values to write by `plan`: as they are now (a copy), or as they are when written."""
        self._now = _by_index(entries)
        if not copy:
            return
        for item in plan.items:
            here = self._now[item.index]
            if item.index not in self._staged:
                self._staged[item.index] = torch.empty_like(
                    here, device="cpu", pin_memory=here.is_cuda
                )
            self._staged[item.index].copy_(here, non_blocking=True)
        if any(one.is_cuda for one in self._now.values()):
            torch.cuda.current_stream().synchronize()
        self._now = self._staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """What DCP's writer asks for."""
        return self._now[write_item.index]


class LoadPlanner(DefaultLoadPlanner):
    """Reads every entry, from whatever blocks it was written in."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._entries = entries
        self._here = _by_index(entries)

    def create_local_plan(self) -> LoadPlan:
        """Raises ValueError for what is not there, not whole, or of another shape or dtype."""
        items: list[ReadItem] = []
        for entry in self._entries:
            saved = self.metadata.state_dict_metadata.get(entry.key) if self.metadata else None
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"it holds no {entry.key}")  # noqa: TRY004 (not a caller's type)
            ours = (tuple(entry.place.shape), entry.values.dtype)
            theirs = (tuple(saved.size), saved.properties.dtype)
            if ours != theirs:
                raise ValueError(f"{entry.key} is {_shown(*theirs)} there and {_shown(*ours)} here")
            chunks = [_chunk(block) for block in _blocks(entry)]
            found = create_read_items_for_chunk_list(entry.key, saved, chunks)
            if sum(math.prod(one.lengths) for one in found) != entry.place.count:
                raise ValueError(f"it holds {entry.key} in part")
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where DCP's reader puts what it read."""
        box = tuple(
            slice(at, at + n)
            for at, n in zip(read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self._here[read_item.dest_index][box]


def _blocks(entry: Entry) -> Iterator[Block]:
    most = max(1, _MOST_BYTES // entry.values.element_size())
    for block in entry.place.blocks():
        yield from block.split(most)


def _by_index(entries: Sequence[Entry]) -> dict[MetadataIndex, Tensor]:
    return {
        MetadataIndex(entry.key, block.offset): entry.values[
            block.start : block.start + block.count
        ].view(block.sizes)
        for entry in entries
        for block in _blocks(entry)
    }


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.sizes))


def _shown(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{' x '.join(map(str, shape)) or 'a scalar'} {str(dtype).removeprefix('torch.')}"
