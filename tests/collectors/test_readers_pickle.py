"""The unpickler gives back what honest writers wrote, and executes nothing, whatever it is fed."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.readers import plain_pickle, read_paths

if TYPE_CHECKING:
    from pathlib import Path

_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(_plain, st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_plain_values_of_every_protocol_come_back(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if protocol < 3 and (b"_codecs" in data or b"__builtin__" in data):
        with pytest.raises(plain_pickle.RefusedError):  # bytes are a call there
            plain_pickle.loads(data)
    else:
        assert plain_pickle.loads(data) == value


class _Call:
    """Pickles to a call of `os.mkdir`."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(
    tmp_path: Path, protocol: int
) -> None:
    target = tmp_path / "made"
    dump = tmp_path / "trace_0"
    dump.write_bytes(pickle.dumps({"entries": [_Call(str(target))]}, protocol))
    source = read_paths([str(dump)]).sources[0]
    assert not target.exists()
    if protocol >= 2:
        assert source.kind == "flight-recorder"
        assert source.read == "none"
        assert "nothing was executed" in source.problems[0]


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL and REDUCE
        b"(ios\nsystem\n.",  # INST
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pid\n.",  # PERSID
        b"\x80\x02(Q.",  # BINPERSID
        b"\x80\x02}b.",  # BUILD
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x05\x97.",  # NEXT_BUFFER
    ],
)
def test_every_opcode_that_names_or_builds_is_refused(opcodes: bytes) -> None:
    with pytest.raises(plain_pickle.RefusedError):
        plain_pickle.loads(opcodes)


def test_a_memo_index_of_four_billion_costs_nothing() -> None:
    assert plain_pickle.loads(b"\x80\x02]r\xff\xff\xff\xff.") == []


def test_deep_marks_are_refused_and_deep_tuples_are_no_keys() -> None:
    with pytest.raises(plain_pickle.RefusedError, match="nested"):
        plain_pickle.loads(b"\x80\x02" + b"(" * 5000 + b".")
    with pytest.raises(plain_pickle.RefusedError, match="key"):
        plain_pickle.loads(b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.")


def test_more_opcodes_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "OPCODES", 100)
    with pytest.raises(plain_pickle.RefusedError, match="more than 100 opcodes"):
        plain_pickle.loads(pickle.dumps(list(range(200))))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_value_or_a_refusal(data: bytes) -> None:
    try:
        plain_pickle.loads(b"\x80\x02" + data)
    except plain_pickle.RefusedError as refusal:
        assert str(refusal)
