"""Counters of ports and NVLinks: sysfs, ethtool -S, rdma statistic, perfquery, nvlink -e, tables.

In: lines, one after another. Out: fields of kind link.counter {name, values, delta, host, device,
gpu, link}: the numbers of one counter as they stand on the line; `delta` when the line or the
heading above it says that they are differences. Counters are cumulative, so a reading alone tells
nothing; whoever uses them takes two.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import whole

_HARD = (
    "symbol_error link_error_recovery link_downed port_rcv_errors port_rcv_remote_physical_errors "
    "local_link_integrity_errors excessive_buffer_overrun_errors rx_crc_errors_phy "
    "rx_symbol_err_phy rx_pcs_symbol_err_phy link_down_events_phy symbolerrorcounter "
    "linkdownedcounter linkerrorrecoverycounter portrcverrors locallinkintegrityerrors "
    "excessivebufferoverrunerrors rx_corrected_bits_phy_uncorrectable"
)
"""Errors of the line itself."""
_CONGESTION = (
    "np_ecn_marked_roce_packets np_cnp_sent rp_cnp_handled port_xmit_wait portxmitwait "
    "port_xmit_discards portxmitdiscards out_of_sequence packet_seq_err implied_nak_seq_err "
    "roce_adp_retrans roce_slow_restart rnr_nak_retry_err local_ack_timeout_err rx_discards_phy "
    "tx_discards_phy rx_pause_ctrl_phy tx_pause_ctrl_phy rx_out_of_buffer duplicate_request "
    + " ".join(f"{w}_prio{n}_pause" for w in ("rx", "tx") for n in range(8))
    + " "
    + " ".join(f"{w}_prio{n}_pause_duration" for w in ("rx", "tx") for n in range(8))
)
"""Marks, pauses, waits and retransmits of a fabric with too much to carry."""
HARD = frozenset(_HARD.split())
CONGESTION = frozenset(_CONGESTION.split())
_KNOWN = HARD | CONGESTION
_WORD = re.compile(r"(?<![A-Za-z0-9])([A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*)(?![A-Za-z0-9])")
_HINT = re.compile(
    r"err|Err|pause|discard|cnp|ecn|downed|Downed|symbol|Symbol|sequence|retrans|xmit|Xmit|restart|"
    r"integrity|Integrity|recovery|Recovery|overrun|duplicate|buffer"
)
_NUMBER = re.compile(r"(?<![\w./])([+]?)(\d{1,3}(?:,\d{3})+|\d{1,20})(?![\w./])")
_DIFFERENCE = re.compile(r"\bdelta|\bdiff|Δ|\bincrease|\bgrowth|\bgrew|\bper (?:s|min|hour)|\+\d")
_PATH = re.compile(r"(?:([A-Za-z][\w.-]*):)?\S*/infiniband/([\w.-]+)/ports/\d+/")
_DEVICE = re.compile(
    r"\b(mlx[45]_\w+|bnxt_re\d+|irdma\d+|efa_\d+|ib\d+|en[opsx]\w+|eth\d+|rdma\d+)\b"
)
_HOST = re.compile(
    r"^(?:[#=>*\[-]+\s*)?(?:host|node|hostname)?[\s:=]*([A-Za-z][A-Za-z.-]*[\w.-]*\d[\w.-]*)\b"
)
_GPU = re.compile(r"^GPU (\d{1,4})\b")
_NVLINK = re.compile(
    r"^\s*Link (\d{1,3}): ((?:Replay|Recovery|CRC\w*|ECC|Data)(?: \w+){0,3}? Errors?):? (\d{1,18})"
)
_COLUMNS = 64
_HEADING = 100
"""Characters of a line that can head counters."""


class Counters:
    """Counters of one file."""

    def __init__(self) -> None:
        self.host: str | None = None
        self.device: str | None = None
        self.gpu: int | None = None
        self.difference = False
        self.columns: list[str] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Counters of this line."""
        found = _GPU.match(text)
        if found:
            self.gpu = int(found[1])
        if self.gpu is not None and (link := _NVLINK.match(text)):
            told = {"gpu": self.gpu, "link": int(link[1]), "name": link[2].lower()}
            return [{**told, "values": [int(link[3])], "delta": self.difference}]
        known = (
            [w for w in _WORD.findall(text) if w.lower() in _KNOWN] if _HINT.search(text) else []
        )
        if len(known) > 1 and not _NUMBER.search(_strip(text, known)):
            self.columns = text.replace("|", " ").split()[:_COLUMNS]
            self.difference = self.difference or bool(_DIFFERENCE.search(text))
            return []
        if known:
            return [] if len(known) > 8 else self._named(text, known)
        if self.columns:
            row = self._row(text)
            if row is not None:
                return row
            self.columns = []
        self._heading(text)
        return []

    def _named(self, text: str, known: list[str]) -> list[dict[str, Any]]:
        path = _PATH.search(text)
        host, device = (path[1], path[2]) if path else (None, None)
        device = device or next(iter(_DEVICE.findall(text)), None)
        out = []
        for at, name in enumerate(known):
            start = text.index(name) + len(name)
            end = text.find(known[at + 1], start) if at + 1 < len(known) else len(text)
            numbers = _NUMBER.findall(
                text[start : end if end >= 0 else len(text)].replace("..", " ")
            )
            values = [v for _, n in numbers[:4] if (v := whole(n)) is not None]
            if not values:
                continue
            signed = any(sign for sign, _ in numbers) or bool(_DIFFERENCE.search(text))
            out.append(self._event(name, values, self.difference or signed, host, device))
        return out

    def _row(self, text: str) -> list[dict[str, Any]] | None:
        cells = text.replace("|", " ").split()
        if len(cells) != len(self.columns):
            return None
        host = next((c for c in cells if _HOST.match(c) and not _DEVICE.fullmatch(c)), None)
        device = next((c for c in cells if _DEVICE.fullmatch(c)), None)
        out = []
        for column, cell in zip(self.columns, cells, strict=True):
            plain = cell.lstrip("+").replace(",", "")
            if column.lower() in _KNOWN and plain.isdecimal() and len(plain) < 20:
                signed = cell.startswith("+")
                out.append(
                    self._event(column, [int(plain)], self.difference or signed, host, device)
                )
        return out or None

    def _event(
        self, name: str, values: list[int], delta: bool, host: str | None, device: str | None
    ) -> dict[str, Any]:
        out: dict[str, Any] = {"name": name.lower(), "values": values, "delta": delta}
        host, device = host or self.host, device or self.device
        return out | ({"host": host} if host else {}) | ({"device": device} if device else {})

    def _heading(self, text: str) -> None:
        """What a line without counters says of those below it."""
        if not text.strip() or len(text) > _HEADING:
            return
        self.difference = bool(_DIFFERENCE.search(text))
        device = _DEVICE.search(text)
        if device:
            self.device = device[1]
        host = _HOST.match(text.strip())
        if host and not _DEVICE.fullmatch(host[1]) and (len(text.split()) < 7):
            self.host = host[1]


def _strip(text: str, names: list[str]) -> str:
    for name in names:
        text = text.replace(name, " ")
    return text
