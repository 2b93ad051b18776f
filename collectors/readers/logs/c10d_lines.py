"""Lines of torch.distributed: watchdog, heartbeat, desync, gloo, stores, fingerprints.

In: the bare text of a line, its `[PG ...]` tag already taken off. Out: rules. Numbers of works are
per process group and rank; -1 and the garbage of unsigned types both mean "none yet" and become -1.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.c10d import op_word
from collectors.readers.logs.rule import fields_of, rule

_WORK = re.compile(
    r"WorkNCCL\(SeqNum=(?P<i_seq>\d+), OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<i_numel_in>\d+), NumelOut=(?P<i_numel_out>\d+))?"
    r", Timeout\(ms\)=(?P<i_timeout_ms>\d+)\)(?: ran for (?P<i_ran_ms>\d+) milliseconds)?"
)
_LAST = re.compile(r"[Ll]ast (enqueued|started|completed)(?: NCCL)? work: (-?\d{1,20})")
_PRINT = re.compile(
    r"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\((SequenceNumber=.*?"
    r"TensorDeviceTypes=TensorOptions\(.*?\)|.*?)\)(?=,? but|\.|$|\. ?Collectives)"
)
_OP = re.compile(r"OpType=(\w+)")
_SHAPE = re.compile(r"TensorShape=(\[[^\]]*\])")
_DTYPES = re.compile(r"TensorDtypes=([^,)]*)")
_SEQ = re.compile(r"SequenceNumber=(\d{1,18})")
_RANKS = re.compile(r"\d{1,7}")
_BIG = 2**31
"""A work number from here on is the garbage of "none completed"."""


def _work(text: str, out: dict[str, Any]) -> None:
    found = _WORK.search(text)
    if found:
        out.update(fields_of(found))
    if isinstance(out.get("op"), str):
        out["op"] = op_word(out["op"])
    for word, value in _LAST.findall(text):
        work = int(value)
        out[f"last_{word}"] = -1 if work < 0 or work >= _BIG else work


def _fingerprints(text: str, out: dict[str, Any]) -> None:
    """One mapping a named rank; the two need not be the odd one: each rank blames another."""
    prints: dict[str, dict[str, Any]] = {}
    for rank, body in _PRINT.findall(text)[:8]:
        one: dict[str, Any] = {}
        for name, pattern in (("op", _OP), ("shape", _SHAPE), ("dtypes", _DTYPES), ("seq", _SEQ)):
            found = pattern.search(body)
            if found:
                one[name] = int(found.group(1)) if name == "seq" else found.group(1).strip()
        if "op" in one:
            one["op"] = op_word(one["op"])
        prints[str(int(rank))] = one
    out["fingerprints"] = prints
    differs = text.partition("differ in the following aspects:")[2]
    words = ("Sequence number", "Op type", "Tensor Tensor shapes", "Tensor Tensor dtypes")
    out["differs"] = [w.removeprefix("Tensor ") for w in words if w in differs]


def _named_ranks(_text: str, out: dict[str, Any]) -> None:
    out["ranks"] = [int(r) for r in _RANKS.findall(str(out.pop("named", "")))[:4096]]


def _desync(text: str, out: dict[str, Any]) -> None:
    _named_ranks(text, out)
    out["op"] = op_word(str(out.get("op", "")))


RULES = (
    rule(
        "nccl.watchdog-terminated",
        "terminated with exception",
        r"watchdog thread terminated with exception: (?P<message>.*)",
        _work,
    ),
    rule(
        "nccl.timeout",
        "WorkNCCL(",
        r"WorkNCCL\(.*?\)[^.]*(?P<how>timed out in blocking wait|before timing out|ran for)?",
        _work,
    ),
    rule(
        "nccl.timeout",
        "Watchdog caught collective operation timeout",
        r"Watchdog caught collective operation timeout: (?P<message>.*)",
        _work,
    ),
    rule(
        "nccl.watchdog-status",
        "detected by watchdog at work",
        r"detected by watchdog at work(?: sequence id)?: (?P<i_work>\d+)",
        _work,
    ),
    rule(
        "nccl.watchdog-status",
        "Timeout at NCCL work",
        r"Timeout at NCCL work: (?P<i_work>\d+)",
        _work,
    ),
    rule(
        "nccl.dump-signal",
        "Received a dump signal",
        r"Received a dump signal due to a collective timeout from +(?:rank "
        r"(?P<i_from_rank>\d+)|this local rank)",
        _work,
    ),
    rule(
        "nccl.dump-signal",
        "dump signal from another rank",
        r"Observed flight recorder dump signal from another rank",
    ),
    rule(
        "nccl.dump-written",
        "Flight Recorder debug info to",
        r"Finished writing Flight Recorder debug info to (?P<file>\S+)",
    ),
    rule(
        "nccl.heartbeat-stuck",
        "watchdog got stuck for",
        r"watchdog got stuck for (?P<i_seconds>\d+) seconds",
    ),
    rule("nccl.gil", "possible GIL induced hang", r"Could not acquire GIL within (?P<i_ms>\d+) ms"),
    rule(
        "nccl.remote-error",
        "remote error detected from rank",
        r"remote error detected from rank: (?P<i_from_rank>\d+)",
    ),
    rule(
        "nccl.unique-id",
        "retrieving ncclUniqueId from",
        r"retrieving ncclUniqueId from \[(?P<i_from_rank>\d+)\].*?got error: (?P<message>.*)",
    ),
    rule(
        "nccl.desync",
        "Timeout at collective:",
        r"Timeout at collective: (?P<op>\w+), #(?P<i_seq>\d+).*?desync are:(?P<named>(?: "
        r"?\[[\d, ]+\])+)",
        _desync,
    ),
    rule(
        "nccl.closed-by-peer",
        "closed by remote peer",
        r"(?:socketProgress|Net|NET/Socket)[^:]*: Connection closed by remote peer (?P<peer>\S+)?",
    ),
    rule("nccl.error", "NCCL error", r"NCCL error(?: in)?: (?P<message>.*)"),
    rule("nccl.error", "ncclRemoteError", r"ncclRemoteError: (?P<message>.*)"),
    rule("nccl.error", "ncclSystemError", r"ncclSystemError: (?P<message>.*)"),
    rule("nccl.error", "ncclInternalError", r"ncclInternalError: (?P<message>.*)"),
    rule("nccl.error", "ncclUnhandledCudaError", r"ncclUnhandledCudaError: (?P<message>.*)"),
    rule(
        "nccl.warn",
        "NCCL WARN",
        r"(?P<host>[\w.-]+):(?P<i_pid>\d+):\d+ \[(?P<i_device>-?\d+)\] (?:\S+:\d+ )?(?:\(\w+\) "
        r")?NCCL WARN (?P<message>.*)",
    ),
    rule(
        "gloo.closed-by-peer",
        "Connection closed by peer",
        r"Connection closed by peer \[(?P<peer>[^\]]+)\](?::(?P<i_port>\d+))?",
    ),
    rule(
        "gloo.closed-by-peer",
        "Connection reset by peer",
        r"gloo/transport\S+.*?Connection reset by peer(?: \[(?P<peer>[^\]]+)\])?",
    ),
    rule(
        "gloo.timeout",
        "Timed out waiting",
        r"Timed out waiting (?P<i_timeout_ms>\d+)ms for (?P<direction>send|recv) operation to "
        r"complete",
    ),
    rule("gloo.pair-closed", "caused pair closure", r"Application timeout caused pair closure"),
    rule(
        "gloo.size-mismatch",
        "op.preamble.length <= op.nbytes",
        r"op\.preamble\.length <= op\.nbytes\.?\s*(?P<i_received>\d+) vs (?P<i_expected>\d+)",
    ),
    rule(
        "gloo.size-mismatch",
        "Received data size doesn't match expected size",
        r"Received data size doesn't match expected "
        r"size.*?(?P<i_received>\d+)\D+(?P<i_expected>\d+)",
    ),
    rule(
        "gloo.monitored-barrier",
        "failed to pass monitoredBarrier",
        r"\bRanks? (?P<named>[\d, ]+) failed to pass "
        r"monitoredBarrier in (?P<i_timeout_ms>\d+) ms",
        _named_ranks,
    ),
    rule(
        "gloo.monitored-barrier-peer",
        "successfully reached monitoredBarrier",
        r"Rank (?P<i_reporter>\d+) successfully reached monitoredBarrier",
    ),
    rule(
        "c10d.mismatch",
        "Detected mismatch between collectives",
        r"Detected mismatch between collectives on ranks",
        _fingerprints,
    ),
    rule(
        "store.clients-missing",
        "waiting for clients",
        r"Timed out after (?P<i_seconds>\d+) seconds waiting for clients\. "
        r"(?P<i_joined>\d+)/(?P<i_expected>\d+) clients joined",
    ),
    rule(
        "store.connect-timeout",
        "while trying to connect to",
        r"client socket has timed out after (?P<i_timeout_ms>\d+) ?ms while trying to connect to "
        r"\((?P<host>[^,]+), (?P<i_port>\d+)\)",
    ),
    rule(
        "store.retry",
        "failed to connect/validate to host",
        r"failed to connect/validate to host (?P<host>\S+?):(?P<i_port>\d+) - (?P<what>\w+)",
    ),
    rule(
        "store.wait-timeout",
        "wait timeout after",
        r"wait timeout after (?P<i_timeout_ms>\d+) ?ms, keys: (?P<keys>\S+)",
    ),
    rule("store.closed", "failed to recv, got 0 bytes", r"failed to recv, got 0 bytes"),
    rule("store.closed", "Broken pipe", r"(?:TCPStore|sendBytes|socket|store).*Broken pipe"),
    rule("store.address-in-use", "EADDRINUSE", r"EADDRINUSE(?:.*?address already in use)?"),
)
