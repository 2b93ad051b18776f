"""What is said when no root was found: health with its numbers, or an abstention.

In: evidence, metrics, context findings. Out: exactly one of Health and Abstention. No data is never
health: a job is healthy when it ended well (or runs) and its steps or collectives were seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from playbooks import benchmarks
from playbooks.finding import Abstention
from playbooks.report.model import Health
from playbooks.rules.common import SIGINT, SIGKILL, SIGTERM
from playbooks.words import count, ranks_words, seconds, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding

STDERR = (
    "the stderr and exit code of every rank "
    "(`torchrun --log-dir DIR --redirects 3 --tee 3`, @record on main)"
)
MEMORY = "torch.cuda.memory_summary() of that rank at the failure, and the parallel layout"
DUMPS = (
    "Flight Recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE=2000, older "
    "TORCH_NCCL_TRACE_BUFFER_SIZE, with TORCH_NCCL_DUMP_ON_TIMEOUT=1)"
)


def answer(
    evidence: Evidence, metrics: dict[str, Any], context: Sequence[Finding]
) -> tuple[Health | None, Abstention | None]:
    """Exactly one of the two."""
    memory = [f for f in context if f.cause.startswith("oom.")]
    if memory:
        return None, Abstention(memory[0].summary, (MEMORY,))
    healthy = _healthy_run(evidence, metrics) if evidence.run else _healthy_loose(evidence)
    if healthy is not None:
        return Health(healthy, _numbers(evidence, metrics)), None
    return None, _abstention(evidence)


def _numbers(evidence: Evidence, metrics: dict[str, Any]) -> dict[str, Any]:
    """The few numbers that describe a healthy job; the rest is in metrics."""
    names = ("steps", "step_time_s", "step_time_spread", "tokens_per_s", "loss", "collectives")
    out: dict[str, Any] = {name: metrics.get(name) for name in names}
    out["ranks"] = len(evidence.seen) or None
    out["data_wait_share"] = metrics.get("data_wait_share")
    peaks = [v["rss"] for v in metrics.get("peak_memory", {}).values() if v["rss"] is not None]
    out["peak_rss"] = max(peaks, default=None)
    return {name: value for name, value in out.items() if value is not None}


def _did(metrics: dict[str, Any]) -> str:
    """ "200 steps of 41 ms, 12300 tokens/s, loss 5.41 to 2.13"."""
    parts = [count(metrics["steps"], "step")]
    if metrics["step_time_s"] is not None:
        parts[0] += f" of {seconds(metrics['step_time_s'])}"
    if metrics["tokens_per_s"] is not None:
        parts.append(f"{metrics['tokens_per_s']:.0f} tokens/s")
    if metrics["loss"] is not None:
        parts.append(f"loss {metrics['loss']['first']:.3g} to {metrics['loss']['last']:.3g}")
    return ", ".join(parts)


def _healthy_run(evidence: Evidence, metrics: dict[str, Any]) -> str | None:
    seen = bool(metrics["steps"]) or bool(metrics["collectives"])
    who = count(len(evidence.seen), "rank")
    if evidence.stopped:
        return None
    if not seen and not (evidence.live and evidence.seen):
        return None
    if evidence.live:
        return f"The job runs: {who}, {_did(metrics)} so far, nothing wrong in what was seen."
    if evidence.interrupted:
        return (
            f"The job was interrupted by the user or its launcher: {who}, {_did(metrics)} until "
            "then, nothing wrong in what was seen."
        )
    if evidence.finished_well:
        attempt = int(evidence.collected.ints("ranks", "attempt", 0).max(initial=0))
        again = f" in attempt {attempt + 1}" if attempt else ""
        return f"The job ended well{again}: {who}, {_did(metrics)}, nothing wrong in what was seen."
    return None


def _healthy_loose(evidence: Evidence) -> str | None:
    """Flight Recorder dumps in which all is complete on all ranks; a plan that fits."""
    ledger = evidence.ledger
    failed = evidence.raised or any(e.signal or e.exit_code for e in evidence.ends)
    if len(ledger) and not failed and not ledger.unfinished(None).any() and not evidence.missing:
        ranks = {int(r) for r in set(ledger.rank.tolist()) if r >= 0}
        if len(ranks) > 1 and ranks == set(range(evidence.world_size or len(ranks))):
            return (
                f"Nothing is pending: all {count(len(ledger), 'operation')} that "
                f"{count(len(ranks), 'rank')} recorded are complete and agree."
            )
    tested = None if failed else benchmarks.sound(evidence)
    if tested is not None:
        return tested
    well = _ended_well(evidence)
    if well is not None and not failed:
        return well
    if evidence.collected.plan is not None and evidence.collected.topologies:
        return "The plan's groups fit the links of the topology that was given."
    return None


def _ended_well(evidence: Evidence) -> str | None:
    """A record of a good end, and no trouble after which the job did not go on."""
    story = evidence.story
    done = [row for row, _ in story.of("train.done")]
    codes = [fields.get("exit_code") for _row, fields in story.of("job.exit")]
    states = [fields.get("state") for _row, fields in story.of("slurm.state")]
    if any(c for c in codes) or any(s != "COMPLETED" for s in states):
        return None
    if not (done or codes or states):
        return None
    if not (done or story.steps or story.of("train.step")):
        return None
    last: dict[str, int] = {}
    for place, row in enumerate(story.rows):
        if row["kind"] in ("train.step", "train.done"):
            last[row["source"]] = place
    for place, row in enumerate(story.rows):
        if row["kind"].startswith(_TROUBLE) and place > last.get(row["source"], -1):
            return None
        if row["kind"] in _FATAL:
            return None
    if done and not codes and not states:
        return "The log says that training finished, and no line in it reports a failure."
    return "The job's steps went on to its end, and its launcher or scheduler recorded success."


_FATAL = ("nccl.timeout", "nccl.watchdog-terminated", "elastic.failure", "elastic.worker-exit")
_TROUBLE = ("python.exception", "oom.", "nccl.timeout", "gloo.", "elastic.failure", "kernel.")


def _kinds(evidence: Evidence) -> set[str]:
    return {k for k in evidence.collected.texts("log_events", "kind") if k}


def _abstention(evidence: Evidence) -> Abstention:
    readable = [s for s in evidence.collected.sources if s.read != "none"]
    if not readable and not evidence.seen and not evidence.run:
        return Abstention("Nothing that was given is in a format that diag reads.", (DUMPS, STDERR))
    waits = evidence.waits
    unknown = sorted({a for w in waits.waits for a in w.absent} - evidence.seen)
    if unknown:
        return Abstention(
            f"{ranks_words(waits.inside, capital=True)} wait in a collective for "
            f"{ranks_words(unknown)}, of which nothing was given: dead, stuck or not collected.",
            (f"the log, exit code or Flight Recorder dump of {ranks_words(unknown)}", DUMPS),
        )
    if waits.waits and evidence.missing:
        return Abstention(
            f"{ranks_words(waits.inside, capital=True)} wait in a collective; nothing was given of "
            f"{ranks_words(evidence.missing)}, where a death, a stall or a mismatch would show.",
            (f"logs or Flight Recorder dumps of {ranks_words(evidence.missing)}",),
        )
    if evidence.missing and len(evidence.ledger):
        return Abstention(
            f"Nothing is pending in the dumps that were given, but {ranks_words(evidence.missing)} "
            "left none: dead, stuck, or not collected.",
            (f"the dump, log or exit code of {ranks_words(evidence.missing)}",),
        )
    if evidence.run and evidence.stopped and not _failed_before_hang(evidence):
        return _stood_still(evidence)
    first = next((e for e in evidence.ends if e.signal or e.exit_code), None)
    if first is not None and not (evidence.interrupted and first.signal in _PASSED_ON):
        raised = next((r for r in evidence.raised if r.rank == first.rank), None)
        if raised is not None:
            return Abstention(
                f"{ranks_words([first.rank], capital=True)} ended with {first.words} after it "
                f"raised {shorten(raised.text)}, and no line says what led to that.",
                (STDERR,),
            )
        return Abstention(
            f"{ranks_words([first.rank], capital=True)} ended with {first.words}, and no line says "
            "why; launchers list the victims of another rank's end in the same way.",
            (STDERR,),
        )
    if evidence.run:
        return _run_abstention(evidence)
    return Abstention(
        "What was given shows neither a failure that decides nor that all went well.",
        (STDERR, DUMPS),
    )


_PASSED_ON = (SIGINT, SIGKILL, SIGTERM)
"""How ranks end when their whole job is ended from outside."""


def _failed_before_hang(evidence: Evidence) -> bool:
    """Whether a process had already failed when the job was seen to stand still."""
    return any((e.signal or e.exit_code) and e.rank in evidence.gone for e in evidence.ends)


def _stood_still(evidence: Evidence) -> Abstention:
    """What ended the job after that, diag itself or a person, is no reason."""
    after = (evidence.hang or {}).get("hang_after_s")
    lasted = "" if after is None else f" for {after:.0f} s"
    return Abstention(
        f"No rank made progress{lasted}, and neither the ledger nor the stacks single out a rank.",
        ("`py-spy dump --native` of every rank, twice, 30 s apart",),
    )


def _run_abstention(evidence: Evidence) -> Abstention:
    code = evidence.run.get("exit_code")
    if evidence.interrupted:
        return Abstention(
            "The job was interrupted by the user or its launcher before any step was seen.",
            ("a longer run",),
        )
    if evidence.live:
        return Abstention("The job runs, and no rank has been seen yet.", ("a little more time",))
    if code == 0:
        return Abstention(
            "The job ended with exit code 0, but no rank's steps or collectives were seen.",
            ("a job that uses torch.distributed, or annotations (collectors.annotate)",),
        )
    if evidence.raised:
        first = evidence.raised[0]
        who = "a process" if first.rank is None else ranks_words([first.rank])
        return Abstention(
            f"The job ended with exit code {code}, and {who} raised {shorten(first.text)}; no "
            "record says what led to that.",
            (STDERR,),
        )
    return Abstention(
        f"The job ended with exit code {code}, and no rank's record says why.", (STDERR,)
    )
