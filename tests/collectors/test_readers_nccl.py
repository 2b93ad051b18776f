"""NCCL's lines of every era become the same facts, whatever glues or launches them; hostile lines
cost no more than ordinary ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from collectors.readers import read_paths

OLD = (
    "a1:7:8 [1] x.cc:9 NCCL WARN NET/IB : Got completion from peer 10.2.0.9<55> with error 12, "
    "opcode 0, len 0, vendor err 129"
)
NEW = (
    "[2026-05-05 06:16:47] a1:7:8 [1] ib.cc:9 (poll) NCCL WARN NET/IB: Got completion from peer "
    "10.2.0.9<55> with status=IBV_WC_RETRY_EXC_ERR(12) hca mlx5_7"
)


def events(text: str, kind: str) -> list[dict[str, Any]]:
    """Fields of the events of that kind."""
    rows = read_paths(["-"], text.encode()).rows("log_events")
    return [json.loads(r["fields"]) | {"@host": r["host"]} for r in rows if r["kind"] == kind]


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        (
            "a1:7:8 [0] NCCL INFO Bootstrap : Using eth3:10.2.0.1<0>",
            "nccl-info.bootstrap",
            {"interface": "eth3", "address": "10.2.0.1"},
        ),
        (
            "a1:7:8 [0] NCCL INFO Bootstrap: Using eth3:10.2.0.1<0>",
            "nccl-info.bootstrap",
            {"interface": "eth3", "pid": 7},
        ),
        (
            "[2] a1:7:8 [2] NCCL INFO Using network AWS Libfabric",
            "nccl-info.net",
            {"network": "AWS Libfabric"},
        ),
        (
            "a1:7:8 [0] NCCL INFO NET/IB : Using [0]mlx5_4:1/RoCE [RO]; OOB eth3:10.2.0.1<0>",
            "nccl-info.ib",
            {"devices": [{"name": "mlx5_4", "port": 1, "layer": "RoCE"}]},
        ),
        (
            "a1:7:8 [1] NCCL INFO Channel 03/0 : 7[7] -> 8[0] [send] via NET/IB/3(5)/GDRDMA/Shared",
            "nccl-info.channel",
            {"network": "IB", "nic": 3, "proxy": 5, "gdr": True},
        ),
        (
            "a1:7:8 [1] NCCL INFO Channel 03 : 1[4c000] -> 0[3b000] via SHM/direct/direct",
            "nccl-info.channel",
            {"transport": "SHM", "source": 1, "target": 0},
        ),
        (
            "a1:7:8 [1] NCCL INFO comm 0x7f rank 5 nranks 8 cudaDev 1 busId 4c000 - Init COMPLETE",
            "nccl-info.comm",
            {"comm_rank": 5, "size": 8, "state": "COMPLETE", "bus_id": "4c000"},
        ),
        (
            "a1:7:8 [1] NCCL INFO NCCL_P2P_LEVEL set by environment to PIX",
            "nccl-info.env",
            {"name": "NCCL_P2P_LEVEL", "value": "PIX"},
        ),
        ("NCCL version 2.4.8+cuda10.1", "nccl-info.version", {"version": "2.4.8"}),
        (
            OLD,
            "nccl.completion-error",
            {"peer": "10.2.0.9", "status": 12, "vendor": "129", "@host": "a1"},
        ),
        (
            NEW,
            "nccl.completion-error",
            {"status": 12, "hca": "mlx5_7", "host": "a1"},
        ),
        (
            "a1:7:8 [0] NCCL INFO NET/IB : mlx5_0:1 speed change detected: 400000 -> 100000 Mbps",
            "nccl.speed-change",
            {"before": 400000, "after": 100000},
        ),
        (
            "a1:7:8 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)",
            "nccl.ofi-provider",
            {"provider": "efa"},
        ),
    ],
)
def test_a_line_becomes_its_fact(text: str, kind: str, wanted: dict[str, Any]) -> None:
    for prefix in ("", "[default3]:", "3: ", "[1,3]<stderr>:", "[rank3]: "):
        found = events(prefix + text + "\n", kind)
        assert len(found) == 1, prefix
        assert found[0].items() >= wanted.items()


def test_thousands_of_channels_say_one_thing_once() -> None:
    one = "a1:7:8 [0] NCCL INFO Channel {:02d}/0 : 0[0] -> 1[1] via P2P/IPC\n"
    assert len(events("".join(one.format(i) for i in range(64)), "nccl-info.channel")) == 1


@pytest.mark.parametrize(
    "hostile",
    [
        "a" * 60_000 + " NCCL INFO x",
        "a-" * 30_000 + "=",
        "NCCL WARN " + "Connect to <" * 4000,
        "CA '" * 9000,
        "0, " * 20_000,
        "layer 1 load [" * 4000,
        "\x1b[1m" * 9000 + "NCCL ",
    ],
)
def test_hostile_lines_are_read_to_their_end(hostile: str) -> None:
    after = "\nNCCL version 2.19.3\n"
    assert events(hostile + after, "nccl-info.version") != []
