"""An unpickler that knows plain containers and nothing else.

In: bytes of a pickle, protocol 0 to 5. Out: dict, list, tuple, str, bytes, int, float, bool, None.
No opcode that names, calls or builds anything exists here, so that no input can run code; a dict's
key is a plain scalar; the memo is a mapping (C's grows to any index that the input names).
A pickle that ends too early raises `TruncatedError`, which carries what stood on the stack.
"""

from __future__ import annotations

import struct
from typing import Any

OPCODES = 8_000_000
"""Twenty thousand entries with their frames; it bounds memory too, at some 70 bytes an opcode."""
NESTING = 1_000
"""Open marks at one time; real dumps need eight."""


class RefusedError(ValueError):
    """Not a pickle of plain containers."""


class TruncatedError(RefusedError):
    """The pickle breaks off. `levels` is the stack: a list of values for each open mark."""

    def __init__(self, at: int, levels: list[list[Any]]) -> None:
        super().__init__(f"the pickle breaks off at byte {at}")
        self.levels = levels


_FIXED = {
    0x4A: struct.Struct("<i"),  # BININT
    0x4B: struct.Struct("<B"),  # BININT1
    0x4D: struct.Struct("<H"),  # BININT2
    0x47: struct.Struct(">d"),  # BINFLOAT
}
_TEXT = {0x58: 4, 0x8C: 1, 0x8D: 8}  # BINUNICODE, SHORT_BINUNICODE, BINUNICODE8
_BYTES = {0x42: 4, 0x43: 1, 0x8E: 8, 0x54: 4, 0x55: 1}  # BINBYTES*, BINSTRING, SHORT_BINSTRING
_LATIN = {0x54, 0x55}
_CONSTANT = {0x4E: None, 0x88: True, 0x89: False}
_LINES = {0x49, 0x4C, 0x46, 0x53, 0x56}  # INT, LONG, FLOAT, STRING, UNICODE of protocol 0
_MEMO_GET = {0x68: 1, 0x6A: 4}  # BINGET, LONG_BINGET
_MEMO_PUT = {0x71: 1, 0x72: 4}  # BINPUT, LONG_BINPUT
_SCALAR = (str, int, float, bytes, type(None))


def _refusal(code: int) -> str:
    import pickletools

    names = {op.code: op.name for op in pickletools.opcodes}
    name = names.get(chr(code), f"0x{code:02x}")
    return f"refused: opcode {name} is not one of plain containers; nothing was executed"


class _Machine:
    """The stack machine; one instance a pickle."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise self.end()
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise self.end()
        piece = self.data[self.at : end]
        self.at = end + 1
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def end(self) -> TruncatedError:
        return TruncatedError(self.at, [*self.marks, self.stack])

    def to_mark(self) -> list[Any]:
        if not self.marks:
            raise RefusedError("not a pickle: a mark is missing")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def pop(self) -> Any:
        if not self.stack:
            raise RefusedError("not a pickle: its stack is empty")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise RefusedError(f"not a pickle of plain containers: no {kind.__name__} to fill")
        return self.stack[-1]


def _fill(into: dict[Any, Any], pairs: list[Any]) -> None:
    if len(pairs) % 2:
        raise RefusedError("not a pickle: a key has no value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if not isinstance(key, _SCALAR):
            raise RefusedError("refused: a mapping's key is a container")
        into[key] = value


def _line_value(code: int, line: bytes) -> Any:
    try:
        if code == 0x49:
            return {b"00": False, b"01": True}[line] if line in {b"00", b"01"} else int(line)
        if code == 0x4C:
            return int(line.rstrip(b"L"))
        if code == 0x46:
            return float(line)
        if code == 0x53:
            return line.strip()[1:-1].decode("latin-1")
        return line.decode("raw-unicode-escape")
    except ValueError as wrong:
        raise RefusedError(f"not a pickle: {wrong}") from wrong


def _memo(machine: _Machine, code: int) -> bool:
    """Memo opcodes; whether `code` was one."""
    if code == 0x94:  # MEMOIZE
        if not machine.stack:
            raise RefusedError("not a pickle: nothing to remember")
        machine.memo[len(machine.memo)] = machine.stack[-1]
    elif code in _MEMO_PUT or code == 0x70:
        index = _index(machine) if code == 0x70 else machine.number(_MEMO_PUT[code])
        if not machine.stack:
            raise RefusedError("not a pickle: nothing to remember")
        machine.memo[index] = machine.stack[-1]
    elif code in _MEMO_GET or code == 0x67:
        index = _index(machine) if code == 0x67 else machine.number(_MEMO_GET[code])
        if index not in machine.memo:
            raise RefusedError("not a pickle: it recalls what it never stored")
        machine.stack.append(machine.memo[index])
    else:
        return False
    return True


def _index(machine: _Machine) -> int:
    line = machine.line()
    try:
        return int(line)
    except ValueError as wrong:
        raise RefusedError("not a pickle: a memo index is no number") from wrong


def _container(machine: _Machine, code: int) -> bool:
    """Opcodes that make or fill containers; whether `code` was one."""
    stack = machine.stack
    if code == 0x28:  # MARK
        if len(machine.marks) >= NESTING:
            raise RefusedError(f"refused: nested deeper than {NESTING}")
        machine.marks.append(stack)
        machine.stack = []
    elif code == 0x7D:
        stack.append({})
    elif code == 0x5D:
        stack.append([])
    elif code == 0x29:
        stack.append(())
    elif code == 0x75:  # SETITEMS
        pairs = machine.to_mark()
        _fill(machine.top(dict), pairs)
    elif code == 0x73:  # SETITEM
        value = machine.pop()
        key = machine.pop()
        _fill(machine.top(dict), [key, value])
    elif code == 0x65:  # APPENDS
        items = machine.to_mark()
        machine.top(list).extend(items)
    elif code == 0x61:  # APPEND
        item = machine.pop()
        machine.top(list).append(item)
    elif code in (0x85, 0x86, 0x87):  # TUPLE1..3
        size = code - 0x84
        if len(stack) < size:
            raise RefusedError("not a pickle: its stack is empty")
        stack[-size:] = [tuple(stack[-size:])]
    elif code in (0x74, 0x6C, 0x64):  # TUPLE, LIST, DICT
        items = machine.to_mark()
        made: Any = tuple(items) if code == 0x74 else items if code == 0x6C else {}
        if code == 0x64:
            _fill(made, items)
        machine.stack.append(made)
    else:
        return False
    return True


def _scalar(machine: _Machine, code: int) -> bool:
    """Opcodes that push one scalar; whether `code` was one."""
    stack = machine.stack
    if code in _TEXT:
        stack.append(machine.take(machine.number(_TEXT[code])).decode("utf-8", "replace"))
    elif code in _FIXED:
        fixed = _FIXED[code]
        stack.append(fixed.unpack(machine.take(fixed.size))[0])
    elif code in _CONSTANT:
        stack.append(_CONSTANT[code])
    elif code == 0x8A:  # LONG1
        stack.append(int.from_bytes(machine.take(machine.number(1)), "little", signed=True))
    elif code in _BYTES:
        raw = machine.take(machine.number(_BYTES[code]))
        stack.append(raw.decode("latin-1") if code in _LATIN else raw)
    elif code in _LINES:
        stack.append(_line_value(code, machine.line()))
    else:
        return False
    return True


def _rest(machine: _Machine, code: int) -> None:
    if code == 0x80:  # PROTO
        if machine.number(1) > 5:
            raise RefusedError("not a pickle of protocol 5 or older")
    elif code == 0x95:  # FRAME
        machine.take(8)
    elif code == 0x30:  # POP
        machine.pop()
    elif code == 0x31:  # POP_MARK
        machine.to_mark()
    elif code == 0x32:  # DUP
        machine.stack.append(machine.stack[-1] if machine.stack else None)
    else:
        raise RefusedError(_refusal(code))


def loads(data: bytes) -> Any:
    """The value of a pickle; RefusedError or TruncatedError otherwise."""
    machine = _Machine(data)
    size = len(data)
    for _ in range(OPCODES):
        if machine.at >= size:
            raise machine.end()
        code = data[machine.at]
        machine.at += 1
        if code == 0x2E:  # STOP
            return machine.pop()
        if not (_scalar(machine, code) or _memo(machine, code) or _container(machine, code)):
            _rest(machine, code)
    raise RefusedError(f"refused: more than {OPCODES} opcodes")
