"""Flight Recorder bytes to a plain mapping, for every encoding and also when they break off.

In: pickle (through the unpickler of plain containers) or JSON. Out: a Dump with the top mapping,
its entries as mappings, and problems. A top-level list (torch 2.2) becomes `{"entries": list}`.
What is neither raises NotADumpError. Nothing is executed, whatever the bytes say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from collectors.readers import plain_pickle

ENTRIES = 100_000
"""Entries kept of one dump; torch's ring holds 2,000 by default."""
_KNOWN = ("version", "pg_config", "pg_status", "nccl_version", "comm_lib_version", "entries")
_ENTRY = ("profiling_name", "state", "pg_id", "input_sizes")


class NotADumpError(ValueError):
    """Readable perhaps, but no Flight Recorder dump; the message is one clear sentence."""


@dataclass
class Dump:
    """A decoded dump."""

    top: dict[str, Any]
    entries: list[dict[str, Any]]
    encoding: str
    problems: list[str] = field(default_factory=list)
    whole: bool = True


def _looks_like_entry(value: object) -> bool:
    return isinstance(value, dict) and any(key in value for key in _ENTRY)


def _dump(value: object, encoding: str) -> Dump:
    if isinstance(value, list):
        if value and not all(_looks_like_entry(v) for v in value[:100]):
            raise NotADumpError("a list, but not of Flight Recorder entries")
        return _shaped({"entries": value}, encoding)
    if isinstance(value, dict) and any(key in value for key in _KNOWN[:3] + _KNOWN[5:]):
        return _shaped(value, encoding)
    raise NotADumpError(f"{encoding} of something else than a Flight Recorder dump")


def _shaped(top: dict[str, Any], encoding: str) -> Dump:
    out = Dump(top, [], encoding)
    listed = top.get("entries")
    if listed is None:
        return out
    if not isinstance(listed, list):
        out.problems.append("`entries` is no list, so none was read")
        out.whole = False
        return out
    out.entries = [e for e in listed[:ENTRIES] if isinstance(e, dict)]
    if len(listed) > ENTRIES:
        out.problems.append(f"{len(listed)} entries; the first {ENTRIES} were read")
        out.whole = False
    elif len(out.entries) < len(listed):
        out.problems.append(f"{len(listed) - len(out.entries)} entries are no mappings")
        out.whole = False
    return out


def _salvage_pickle(cut: plain_pickle.TruncatedError) -> Dump:
    """What a broken-off pickle had completed: pairs of the top mapping, whole entries."""
    top: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    for level in cut.levels:
        for value in level:
            if isinstance(value, dict) and any(k in value for k in _KNOWN[:3]):
                top.update(value)
            elif _looks_like_entry(value):
                entries.append(value)
        for key, value in pairwise(level):
            if not isinstance(key, str):
                continue
            if (key in _KNOWN and isinstance(value, dict)) or (
                "version" in key and isinstance(value, str)
            ):
                top[key] = value
            elif key == "entries" and isinstance(value, list):
                entries = [v for v in value if _looks_like_entry(v)] + entries
    if not entries and not top:
        raise NotADumpError(str(cut))
    out = _shaped({**top, "entries": entries}, "pickle")
    out.whole = False
    out.problems.append(f"{cut}; {len(entries)} whole entries before it were read")
    return out


def _pickle(data: bytes) -> Dump:
    try:
        return _dump(plain_pickle.loads(data), "pickle")
    except plain_pickle.TruncatedError as cut:
        return _salvage_pickle(cut)
    except plain_pickle.RefusedError as wrong:
        raise NotADumpError(str(wrong)) from wrong


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at


def _salvage_json(text: str) -> Dump:
    """Read key by key and entry by entry up to where the JSON breaks off."""
    decoder = json.JSONDecoder()
    top: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    at = _skip(text, 0, " \t\r\n")
    listed = text[at : at + 1] == "["
    at += 1
    try:
        while at < len(text):
            at = _skip(text, at, " \t\r\n,")
            key = "entries"
            if not listed:
                key, at = decoder.raw_decode(text, at)
                at = _skip(text, at, " \t\r\n:")
            if key == "entries":
                at = at if listed else at + 1
                while at < len(text):
                    at = _skip(text, at, " \t\r\n,")
                    if text[at : at + 1] == "]":
                        at += 1
                        break
                    value, at = decoder.raw_decode(text, at)
                    entries.append(value)
            else:
                top[str(key)], at = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        pass  # this is the break; how far it came is said below
    if not entries and not any(k in top for k in _KNOWN):
        raise NotADumpError("JSON that breaks off before anything of a Flight Recorder dump")
    out = _shaped({**top, "entries": entries}, "json")
    out.whole = False
    out.problems.append(f"the JSON breaks off; {len(entries)} whole entries before it were read")
    return out


def decode(data: bytes) -> Dump:
    """The dump in `data`; NotADumpError with the reason otherwise."""
    start = data.lstrip(b" \t\r\n\xef\xbb\xbf")[:1]
    if start not in (b"{", b"["):
        return _pickle(data)
    text = data.decode("utf-8", "replace").lstrip("\ufeff")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _salvage_json(text)
    return _dump(value, "json")
