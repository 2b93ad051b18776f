"""The agent's CUDA path against a device that is played: nothing is waited for, nothing is lost.

A real device has asynchronous events and works that are complete some time later; the fakes here
are complete when the test says so, and fail the test when anything synchronises.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from collectors.agent import flight
from collectors.agent.collective import Ledger
from collectors.agent.cuda_timing import DeviceTimer
from collectors.agent.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path


class Device:
    """A stream on which each recorded event gets the next millisecond; `passed` are done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = 0.0
        self.made = 0
        self.capturing = False

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802  torch's name
        assert enable_timing
        self.made += 1
        event = SimpleNamespace(at=None)

        def record() -> None:
            self.now += 1.0
            event.at = self.now

        def synchronize() -> None:
            raise AssertionError("the agent waited for the device")

        event.record = record
        event.synchronize = synchronize
        event.query = lambda: event.at is not None and event.at <= self.passed
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def memory_allocated(self) -> int:
        return 10

    def memory_reserved(self) -> int:
        return 20

    def max_memory_allocated(self) -> int:
        return 15


def _recorder(path: Path, device: Device) -> Recorder:
    writer = flight.Writer(path, {"rank": 0})
    return Recorder(writer, lambda: DeviceTimer(SimpleNamespace(cuda=device)))


def test_device_times_arrive_when_the_device_has_passed_them(tmp_path: Path) -> None:
    device = Device()
    recorder = _recorder(tmp_path, device)
    for number in range(3):
        with recorder.step(number), recorder.phase("forward", None, None):
            pass
    phases = [r for r in flight.read(tmp_path).records if r["kind"] == flight.PHASE]
    assert [int(r["wait"]) for r in phases] == [0, 0, 0]
    device.passed = 4.0  # the first two pairs
    with recorder.step(3):
        pass
    phases = [r for r in flight.read(tmp_path).records if r["kind"] == flight.PHASE]
    assert [int(r["wait"]) for r in phases] == [1_000_000, 1_000_000, 0]
    memory = [r for r in flight.read(tmp_path).records if r["kind"] == flight.MEMORY]
    assert {(int(r["a"]), int(r["b"]), int(r["seq"])) for r in memory} == {(10, 20, 15)}


def test_events_come_from_a_pool_and_not_while_a_graph_is_captured(tmp_path: Path) -> None:
    device = Device()
    recorder = _recorder(tmp_path, device)
    for number in range(50):
        device.passed = device.now
        with recorder.step(number), recorder.phase("forward", None, None):
            pass
    assert device.made <= 4
    before = device.made, device.now
    device.capturing = True
    with recorder.step(50), recorder.phase("forward", None, None):
        pass
    assert (device.made, device.now) == before


class Work:
    """An operation on the device."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def get_future(self) -> Any:
        raise AssertionError("a CUDA work's future is done when it is enqueued: it tells nothing")


def _issue(ledger: Ledger, works: list[Work]) -> None:
    one = SimpleNamespace(group_name="0", group_desc="", name=lambda: "nccl")
    group = ledger._add(one, [0, 1])
    pre, post = ledger._hooks(group)
    tensor = SimpleNamespace(
        shape=(4,), dtype="torch.float32", is_cuda=True, numel=lambda: 4, element_size=lambda: 4
    )
    for number, work in enumerate(works):
        name = "HookOpName.ALLREDUCE"
        pre(
            SimpleNamespace(
                name=name, async_op=True, input_tensors=[tensor], output_tensors=[], root=-1,
                op_id=number,
            )
        )  # fmt: skip
        post(SimpleNamespace(name=name, async_op=True, work=work, op_id=number))


def test_operations_on_the_device_end_when_it_says_so(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, Device())
    ledger = Ledger(recorder, None)
    works = [Work(), Work(), Work()]
    _issue(ledger, works)
    works[1].done = True  # out of order: streams differ
    until = time.monotonic() + 10
    while time.monotonic() < until:
        ended = [int(r["end"]) > 0 for r in flight.read(tmp_path).records]
        if any(ended):
            break
        time.sleep(0.01)
    assert ended == [False, True, False]
    recorder.off = True  # ends the thread that asks


def test_waiting_on_the_host_is_not_the_end_on_the_device(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, Device())
    ledger = Ledger(recorder, None)
    work = Work()
    _issue(ledger, [work])
    ledger.waited(ledger.waiting.pop(id(work)), 100, 350, failed=False)
    (row,) = flight.read(tmp_path).records
    assert (int(row["wait"]), int(row["end"])) == (250, 0)
    recorder.off = True
