"""Rates that links have and reach, and the groups that programs print.

In: lines, one after another. Out: (kind, fields) of what a line tells.

| kind | fields |
|---|---|
| nccl.bench | table, size (B), busbw, algbw (GB/s), wrong; rows of nccl-tests |
| nccl.bench-rank | rank, host, device, name: who took part |
| nccl.bench-end | table, busbw (the average), ok |
| net.port | device, rate (Gb/s): what ethtool calls its speed |
| net.measured | rate (Gb/s), tool: what iperf or perftest reached |
| comm.rate | rate (GB/s), text: words before the number, which say of what |
| group.listed | axis, ranks, hosts: the members of one group of an axis |
| rank.place | rank, at (its host), coordinates {axis: number} |
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import number

_ROW = re.compile(
    r"^\s*(\d{1,15})\s+\d{1,15}\s+(?:u?int\d+|float\w*|half|double|bfloat16|f8\w+|fp8\w*)\s+\w+\s+"
    r"(?:-?\d+\s+)?([\d.e+]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+)"
    r"(?:\s+[\d.e+]+\s+([\d.]+)\s+([\d.]+)\s+(\S+))?"
)
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,7}) (?:Group\s+\d+ )?Pid\s+\d+ on\s+(\S+) device\s+(\d{1,4}) "
    r"\[\w+\]\s*(.*?)\s*$"
)
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([\d.]{1,15})")
_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,12})\s+(OK|FAILED)")
_SPEED = re.compile(r"^\s*Speed:\s*(\d{1,7})\s*Mb/s")
_DEVICE = re.compile(r"(?:\bethtool (?:-\w+ )?|Settings for )([a-z][\w.@-]{1,30})\b")
_IPERF = re.compile(r"\bsec\s+[\d.]+ [KMGT]?Bytes\s+([\d.]{1,10}) ([MGT])bits/sec\s+.*receiver")
_PERFTEST = re.compile(
    r"^\s*(\d{4,12})\s+\d{1,12}\s+([\d.]{1,12})\s+([\d.]{1,12})\s+[\d.]{1,12}\s*$"
)
_RATE = re.compile(r"(?<![\w.])(\d{1,6}(?:\.\d{1,6})?) ?G(?:i?B|Byte)/s(?:ec)?\b")
_GROUP = re.compile(
    r"\b(tp|pp|dp|cp|ep|tensor|pipeline|data|context|expert)[\w -]{0,24}?"
    r"(?:groups?|ranks|ring|mesh|comm\w*)\b[^\[(\n]{0,40}[\[(]\s?(?=[\[(]?\d)(.*)$",
    re.IGNORECASE,
)
_LIST = re.compile(r"[\[(]?\s?(\d{1,7}(?:\s?,\s?\d{1,7}){1,4095})\s?[\])]")
_ARROWS = re.compile(
    r"\b(tp|dp|cp|ep|tensor|data|context|expert)\b[^\n]{0,30}?\b(\d{1,7}(?:\s?-{1,2}>\s?\d{1,7}){2,512})",
    re.IGNORECASE,
)
_COORDINATES = re.compile(r"\b(tp|pp|dp|cp|ep)(?:_?rank)?\s?[=: ]\s?(\d{1,6})\b", re.IGNORECASE)
_OF_RANK = re.compile(r"\b(?:global )?rank[ =:]+(\d{1,7})\b", re.IGNORECASE)
_ON_HOST = re.compile(
    r"\b(?:host|node|on)[ =:]+([A-Za-z][\w.-]*\d[\w.-]*|\d{1,5})\b", re.IGNORECASE
)
_AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep"}
_RATES = 4000
_GROUPS = 1024
_BEFORE = 90


class Links:
    """What lines of one file tell of links."""

    def __init__(self) -> None:
        self.table = 0
        self.device = ""
        self.rates = 0
        self.perftest = False

    def feed(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Facts of this line."""
        if "bus bandwidth" in text or text.lstrip().startswith("#"):
            return self._comment(text)
        row = _ROW.match(text) if text[:24].strip()[:1].isdigit() else None
        if row:
            return self._bench(row)
        out = self._port(text)
        listed = _GROUP.search(text) if "," in text else None
        if listed:
            out += self._groups(listed[1], _LIST.findall(listed[2]), listed[2])
        elif ">" in text and (ring := _ARROWS.search(text)):
            out += self._groups(ring[1], [re.sub(r"\s?-+>\s?", ",", ring[2])], text)
        if "ank" in text and (place := self._place(text)) is not None:
            out.append(place)
        if "/s" in text and "NCCL " not in text:
            out += self._rates(text)
        return out

    def _comment(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        found = _RANK.match(text)
        if found:
            name = {"name": found[4][:80]} if found[4] else {}
            told = {"rank": int(found[1]), "host": found[2], "device": int(found[3]), **name}
            return [("nccl.bench-rank", told)]
        found = _AVERAGE.match(text)
        if found:
            value = number(found[1])
            return [("nccl.bench-end", {"table": self.table, "busbw": value})]
        found = _BOUNDS.match(text)
        if found:
            return [("nccl.bench-end", {"table": self.table, "ok": found[2] == "OK"})]
        if re.match(r"#\s+size\s+count\s+type", text):
            self.table += 1
        self.perftest = "BW average" in text or "BW peak" in text
        return []

    def _bench(self, row: re.Match[str]) -> list[tuple[str, dict[str, Any]]]:
        best = max(number(row[4]) or 0.0, number(row[7] or "0") or 0.0)
        algbw = max(number(row[3]) or 0.0, number(row[6] or "0") or 0.0)
        wrong = [w for w in (row[5], row[8]) if w and w not in ("0", "N/A", "0e+00")]
        told = {"table": self.table, "size": int(row[1]), "busbw": best, "algbw": algbw}
        return [("nccl.bench", {**told, "wrong": bool(wrong)})]

    def _port(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        if "ethtool" in text or text.startswith("Settings for"):
            found = _DEVICE.search(text)
            self.device = found[1] if found else ""
            return []
        found = _SPEED.match(text)
        if found:
            return [("net.port", {"device": self.device, "rate": int(found[1]) / 1000})]
        found = _IPERF.search(text) if "bits/sec" in text else None
        if found:
            scale = {"M": 1e-3, "G": 1.0, "T": 1e3}[found[2]]
            value = number(found[1])
            return [] if value is None else [("net.measured", {"rate": value * scale})]
        if self.perftest and (found := _PERFTEST.match(text)):
            value = number(found[3])
            return [] if value is None else [("net.measured", {"rate": value, "tool": "perftest"})]
        return []

    def _groups(self, axis: str, lists: list[str], rest: str) -> list[tuple[str, dict[str, Any]]]:
        axis = _AXES.get(axis.lower(), axis.lower())
        out: list[dict[str, Any]] = []
        for text in lists[:_GROUPS]:
            ranks = [int(r) for r in text.split(",")]
            if len(set(ranks)) == len(ranks):
                out.append({"axis": axis, "ranks": ranks})
        words = re.search(r"\bhosts?\b[: =\[]*(.*)$", rest)
        hosts = re.findall(r"[A-Za-z][\w.-]*", words[1]) if words else []
        if len(out) == 1 and len(hosts) == len(out[0]["ranks"]):
            out[0]["hosts"] = hosts
        return [("group.listed", told) for told in out]

    def _place(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """The coordinates of one rank on the mesh, and its host."""
        rank, host = _OF_RANK.search(text), _ON_HOST.search(text)
        found = {axis.lower(): int(value) for axis, value in _COORDINATES.findall(text)}
        if rank is None or host is None or len(found) < 2:
            return None
        return "rank.place", {"rank": int(rank[1]), "at": host[1], "coordinates": found}

    def _rates(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        out: list[tuple[str, dict[str, Any]]] = []
        for found in _RATE.finditer(text):
            value = number(found[1])
            if value is None or self.rates >= _RATES:
                break
            self.rates += 1
            before = text[max(0, found.start() - _BEFORE) : found.start()]
            out.append(("comm.rate", {"rate": value, "text": before.strip().lower()}))
        return out
