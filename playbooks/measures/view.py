"""Rows, layout and spreads of one pile, worked out once for all rules."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from playbooks.measures import by_rank, events, rows, runs
from playbooks.measures.layout import Layout

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.lines import Event
    from playbooks.measures.values import Row


class Measures:
    """Views of the measurements; built once for each diagnosis."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def rows(self) -> list[Row]:
        """All rows in order."""
        return rows.read(self.evidence.collected)

    @cached_property
    def layout(self) -> Layout:
        """Sizes and coordinates."""
        return Layout(self.rows, self.evidence.lines, self.evidence.collected.world_size)

    @cached_property
    def spreads(self) -> list[by_rank.Spread]:
        """What ranks printed of one thing, side by side."""
        return by_rank.spreads(self.rows, self.layout)

    @cached_property
    def runs(self) -> list[runs.Run]:
        """Series of losses and norms by run."""
        return runs.read(self.rows)

    @cached_property
    def steps(self) -> list[Event]:
        """Losses by step, as progress lines would tell them."""
        return events.steps(self.rows)

    @cached_property
    def loads(self) -> list[Event]:
        """Experts' loads by layer."""
        return events.loads(self.rows)
