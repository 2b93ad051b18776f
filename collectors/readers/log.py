"""Text logs of jobs, launchers, schedulers and kernels, in one stream, line by line.

In: any text. Out: log_events rows (fields as JSON; a number the line lacks is absent), and rows of
`ranks`. Prefixes, ANSI and interleaved writers are normal; memory does not grow with the file.

| kind | fields |
|---|---|
| elastic.failure | root, name, rank, local_rank, exit_code, signal, pid, error_file, message |
| elastic.worker-exit | exit_code, signal, local_rank, pid, binary |
| elastic.signal-sent, .death-signal, .signal-exception | pid, signal; signal_text |
| elastic.heartbeat-lost, .rendezvous, .restart | node; error, message; left, most |
| python.exception | type, message, frames, source, launcher, chained, original, uncaught |
| oom.cuda | requested, gpu, capacity, free, in_use, allowed, allocated, private_pools, |
|   | reserved, reserved_unallocated, others [{pid, bytes}], device, in_traceback |
| oom.cpu | requested; or message, of a MemoryError |
| oom.library | api (cuBLAS, cuDNN, CUDA, NCCL: no numbers) |
| nccl.timeout | op, seq, numel_in, numel_out, timeout_ms, ran_ms |
| nccl.watchdog-terminated | message, and as nccl.timeout when a work is named |
| nccl.watchdog-status | work, last_enqueued, last_started, last_completed |
| nccl.dump-signal, .dump-written | from_rank, last_*; file |
| nccl.heartbeat-stuck, .gil | seconds; ms |
| nccl.remote-error, .unique-id | from_rank, message |
| nccl.desync | op, seq, ranks |
| nccl.closed-by-peer, .error, .warn | peer; message; host, pid, device, message |
| gloo.closed-by-peer, .timeout, .pair-closed | peer, port; timeout_ms, direction |
| gloo.size-mismatch | received, expected (bytes) |
| gloo.monitored-barrier, .monitored-barrier-peer | ranks, timeout_ms; reporter |
| c10d.mismatch | fingerprints {rank: {op, shape, dtypes, seq}}, differs [aspect] |
| store.clients-missing | seconds, joined, expected |
| store.connect-timeout, .retry, .wait-timeout | host, port, timeout_ms; what; keys |
| store.closed, .address-in-use | |
| slurm.task-exit | host, tasks, exit_code, signal, out_of_memory, core_dumped |
| slurm.oom, .cancelled, .node-failure | events, step; step, host, at, reason; host |
| deepspeed.exit, .kill; mpi.exit | local_rank, exit_code, signal; pid; task, host, signal |
| k8s.terminated, .node-not-ready | reason, message |
| process.terminate, .fault | type; message, signal |
| dataloader.worker-killed, .bus-error | pid, signal, exit_code |
| kernel.oom-kill, .oom-killed, .memory-limit | pid, task, memcg, anon_rss; usage, limit |
| kernel.xid, .sxid | xid, pci, pid, task, message |
| kernel.hung-task, .segfault, .link-down, .cable, .file-system, .io-timeout | task, pid; device |
| train.step | step, steps, loss, grad_norm, loss_scale, learning_rate, tokens_per_s, |
|   | samples_per_s, step_time (s), data_time (s), mfu, skipped, nan_iterations |
| train.epoch-end, .validation | epoch, batches; |
| train.timing | who, step, step_s, values, lists: see timings |
| train.size | parameters, vocab, sequence, micro_batch: said in prose |
| train.caught | message, oom: an error that the program caught and went on from |
| rank.progress, .waiting, .pid | done, total, what; what; rank, local_rank, pid |
| deepspeed.spawned, .world | pid, local_rank; hosts {host: processes} |
| job.exit, slurm.state | exit_code, what; job, state, exit_code, signal |
| train.overflow, .world, .done | scale, reduced; rank, world_size |

| gpu.bus, nccl.bench, net.port, link.counter | see gpu_bus, link_lines, counter_lines |
| nccl-info.version, .env, .bootstrap, .socket, .ib, .net, .gdr, .channel, .comm, ... | INFO |
| nccl.completion-error, .verbs-failed, .connect-failed, .shm-failed, ... | failures |
| node, table and trainer kinds | see node_lines, node_tables, trainer_lines |

Lines with a `[PG ...]` tag also carry pg_id, pg (its c10d name) and pg_description.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectors.collected import Reading, Source
from collectors.readers.logs import (
    c10d_lines,
    config_lines,
    counter_lines,
    gpu_blocks,
    gpu_bus,
    host_lines,
    kernel_lines,
    launcher_lines,
    link_lines,
    memory_lines,
    nccl_failures,
    nccl_lines,
    node_lines,
    node_tables,
    progress_lines,
    setting_lines,
    size_lines,
    story_lines,
    times,
    timing_tables,
    timings,
    trainer_lines,
)
from collectors.readers.logs.blocks import Summary, Tracebacks
from collectors.readers.logs.prefix import Line, Stripper
from collectors.readers.logs.reading import Event, LogReading
from collectors.readers.measured import documents
from collectors.readers.measured.lines import Measurements

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact

KIND = "log"
RULES = (
    *memory_lines.RULES,
    *c10d_lines.RULES,
    *launcher_lines.RULES,
    *kernel_lines.RULES,
    *progress_lines.RULES,
    *story_lines.RULES,
    *nccl_failures.RULES,
    *node_lines.RULES,
    *trainer_lines.RULES,
)
_BINARY = 0.05
"""A head with more control bytes than this is no text."""
_TEXT = 4096
"""Characters of a line that patterns see; they cost up to the square of it, and no known line is
longer."""
_HOSTED = ("nccl.", "nccl-info.", "ib.", "gpu.", "link.")
"""Families whose `host` field is the host of the line itself."""
_MAY_BE_CAUGHT = {"oom.cuda", "oom.cpu", "oom.library"}
_QUIET = {"nccl.error", "train.world"}
"""Kinds that other rules of the same line say better."""


def sniff(head: bytes) -> bool:
    """Text: no NUL bytes to speak of, few control bytes."""
    sample = head[:8192]
    if not sample:
        return False
    if sample.lstrip().startswith(b"{") and b"\n{" not in sample and b"}\n" not in sample:
        return documents.holds_numbers(head)  # else one that no reader of documents knows
    odd = sum(b < 9 or 13 < b < 27 or 27 < b < 32 or b == 127 for b in sample)
    return odd <= _BINARY * len(sample) and sample.count(0) * 100 <= len(sample)


class _Scanner:
    """Holds what runs across lines of one file."""

    def __init__(self, reading: LogReading) -> None:
        self.reading = reading
        self.stripper = Stripper()
        self.tracebacks = Tracebacks()
        self.summary = Summary()
        self.nccl = nccl_lines.Info()
        self.tables = node_tables.Tables()
        self.values = config_lines.Values()
        self.measurements: Measurements | None = Measurements(reading.source.path)
        self.bus = gpu_bus.Bus()
        self.links = link_lines.Links()
        self.gpus = gpu_blocks.Blocks()
        self.settings = setting_lines.Settings()
        self.masks = host_lines.Masks()
        self.timings = timings.Scanner()
        self.timing_tables = timing_tables.Tables(self.timings)
        self.counters = counter_lines.Counters()

    def feed(self, number: int, raw: str) -> None:
        """One line of the file."""
        line = self.stripper.strip(number, raw[:_TEXT])
        self.reading.saw(line)
        if line.stamp is not None and line.stamp.year is not None:
            self.reading.years[line.stamp.year] += 1
        inside, failure = self.summary.feed(line)
        if failure is not None:
            self._failure(failure)
        if inside:
            return
        row = None if self.measurements is None else self.measurements.feed(line)
        if row is not None:
            self.reading.measured.append((line, row))
        exception = self.tracebacks.feed(line)
        if exception is not None:
            self.reading.add_event(exception)
        self._rules(line, exception is not None)

    def _failure(self, event: Event) -> None:
        if event.stamp is not None and event.stamp.year is not None:
            self.reading.years[event.stamp.year] += 1
        self.reading.add_event(event)

    def _rules(self, line: Line, ends_traceback: bool) -> None:
        text = line.text
        if "NCCL " in text:
            for kind, told in self.nccl.events(text):
                self._event(line, kind, told)
            if nccl_lines.only_info(text) and "NCCL version" not in text:
                return
        self._machines(line)
        self._paced(line)
        kinds: set[str] = set()
        for told in node_lines.options(text):
            self._event(line, "launch.option", told)
            kinds.add("launch.option")
        for one in [r for r in RULES if r.needle in text]:
            if one.kind in kinds or (kinds and one.kind in _QUIET):
                continue
            fields = one.fields(text)
            if fields is None:
                continue
            kinds.add(one.kind)
            if one.kind == "nccl.watchdog-terminated":
                kinds.add("nccl.timeout")  # the same work, said before on its own line
            if one.kind.startswith("oom."):
                fields["in_traceback"] = ends_traceback
            self._world(one.kind, fields.get("world_size"))
            self._event(line, one.kind, fields)
        self._own_words(line, kinds, ends_traceback)

    def _machines(self, line: Line) -> None:
        """Tables, settings and counters of machines and their links."""
        for kind, told in self.tables.feed(line.text):
            self._event(line, kind, told)
        for told in self.values.feed(line.text):
            self._event(line, "config.value", told)
        for at, told in self.bus.feed(line):
            self._event(at, "gpu.bus", told)
        for told in self.counters.feed(line.text):
            self._event(line, "link.counter", told)
        for kind, told in self.links.feed(line.text):
            self._event(line, kind, told)

    def _paced(self, line: Line) -> None:
        """Numbers of phases, work and devices that the line tells, in a table or in words."""
        told = self.timing_tables.feed(line.text)
        if told is None and not self.timing_tables.inside(line.text):
            told = self.timings.feed(line.text)
        if told is not None:
            self._event(line, "train.timing", told)
        for at, sample in self.gpus.feed(line):
            self._event(at, "gpu.sample", sample)
        for setting in self.settings.feed(line.text):
            self._event(line, "train.setting", setting)
        found = host_lines.read(line.text) or self.masks.feed(line.text)
        if found is not None and not (found[0] == "train.mark" and trainer_lines.saves(line.text)):
            self._event(line, *found)

    def _own_words(self, line: Line, kinds: set[str], ends_traceback: bool) -> None:
        """Progress and whatever else a program says in words that no rule knows."""
        if not kinds or kinds == {"train.world"}:
            progress = progress_lines.step(line.text)
            if progress is not None:
                self.reading.add_event(Event(line, "train.step", progress))
            elif not kinds and not ends_traceback:
                self._story(line)
                self._sizes(line)
        elif kinds <= _MAY_BE_CAUGHT and not ends_traceback:
            self._story(line, only="train.caught")

    def _story(self, line: Line, only: str | None = None) -> None:
        """What a program says in its own words, of the rank that it names."""
        told = story_lines.read(line.text)
        if told is not None and only in (None, told[0]):
            self.reading.add_event(Event(line, *told, rank=self.stripper.named(line)))

    def _sizes(self, line: Line) -> None:
        sizes = size_lines.read(line.text)
        if sizes is not None:
            self.reading.add_event(Event(line, "train.size", sizes))

    def _event(self, line: Line, kind: str, fields: dict[str, Any]) -> None:
        if kind.startswith("nccl"):
            nccl_lines.typed(line.text, fields)
        host = fields.get("host") if kind.startswith(_HOSTED) else None
        self.reading.add_event(Event(line, kind, fields, host=host))

    def _world(self, kind: str, size: object) -> None:
        if kind == "train.world" and isinstance(size, int) and 0 < size < 2**24:
            self.reading.world_size = max(self.reading.world_size or 0, size)

    def close(self) -> None:
        """The end of the file."""
        failure = self.summary.close()
        if failure is not None:
            self._failure(failure)
        for at, told in self.bus.close():
            self._event(at, "gpu.bus", told)
        for at, sample in self.gpus.close():
            self._event(at, "gpu.sample", sample)


def read(artifact: Artifact) -> Reading:
    """Events of one file; their rows follow in logs.settle, which knows the whole pile."""
    problems: list[str] = []
    reading = LogReading(Source(artifact.path, KIND, "all"), modified_ns=artifact.modified_ns)
    scanner = _Scanner(reading)
    document = documents.read(artifact)
    if document is not None:
        scanner.measurements = None
        reading.measured = [(Line(0, ""), row) for row in document]
    for number, raw in artifact.lines(problems):
        scanner.feed(number, raw)
        if not reading.years and (found := times.YEAR.search(raw)):
            reading.years[int(found.group(1) or found.group(2))] += 1
    scanner.close()
    part = bool(problems)
    if reading.left_out:
        problems.append(f"{reading.left_out} more events were counted and not kept")
    if not reading.events:
        problems.append("no line in it is known here")
    kind = KIND if reading.events else "text"
    reading.source = Source(artifact.path, kind, "part" if part else "all", tuple(problems))
    return reading
