"""Joins several Collected into one, such as a run directory and loose logs beside it.

In: Collected of any source. Out: one Collected; `stack_id` of collectives follows its row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors import schema
from collectors.collected import Collected, empty

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


def _shifted(table: pa.Table, by: int) -> pa.Table:
    import pyarrow.compute as pc

    place = table.schema.get_field_index("stack_id")
    return table.set_column(place, "stack_id", pc.add(table.column(place), by))


def join(parts: Sequence[Collected]) -> Collected:
    """All rows of all parts; of plan and run.json the first part that has one counts."""
    import pyarrow as pa

    out = empty()
    pieces: dict[str, list[pa.Table]] = {name: [] for name in schema.TABLES}
    stacks = 0
    for part in parts:
        for name, table in part.tables.items():
            moved = name == "collectives" and stacks > 0 and table.num_rows > 0
            pieces[name].append(_shifted(table, stacks) if moved else table)
        stacks += part.tables["stacks"].num_rows
        out.sources.extend(part.sources)
        out.topologies.extend(part.topologies)
        out.plan = out.plan or part.plan
        out.run = out.run or part.run
        if part.world_size is not None:
            out.world_size = max(out.world_size or 0, part.world_size)
    out.tables = {name: pa.concat_tables(some) for name, some in pieces.items() if some}
    return out
