"""All readers, in the order in which they are asked: the narrow ones first, plain text last.

A format is one module with KIND, `sniff(head) -> bool` and `read(artifact) -> Reading`; a new one
is written beside the others and gets its line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors.readers import (
    error_file,
    flight_recorder,
    inspector,
    kineto,
    log,
    nccl_topology,
    operator_trace,
    plan_file,
    rocm_topo,
    smi_xml,
    stack_dump,
    topo_matrix,
)

if TYPE_CHECKING:
    from collectors.readers.artifact import Reader

READERS: tuple[Reader, ...] = (
    error_file,
    inspector,
    kineto,
    flight_recorder,
    plan_file,
    nccl_topology,
    smi_xml,
    rocm_topo,
    topo_matrix,
    stack_dump,
    operator_trace,
    log,
)
