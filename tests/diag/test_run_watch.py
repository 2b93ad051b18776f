"""When a job is called stuck, and when it is not: the state machine, without processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from diag.watch import Hang, HangPolicy, Progress, Resumed, current


@dataclass(frozen=True)
class View:
    rank: int = 0
    attempt: int = 0
    pid: int = 1
    host: str = "a"
    records: int = 100
    last_ns: int = 7
    steps: int = 10
    step_median_ns: int | None = 40_000_000
    closed: bool = False
    phase: str | None = None


def watch(progress: Progress, ranks: list[View], seconds: int, alive: int | None = None) -> list:
    """Look once a second; the events with the second they came at."""
    number = len(ranks) if alive is None else alive
    looks = ((at, progress.look(ranks, number, 1.0)) for at in range(seconds))
    return [(at, event) for at, event in looks if event is not None]


TWO = [View(0), View(1, last_ns=9)]


def test_silence_is_a_hang_once_and_names_the_newest_record() -> None:
    progress = Progress(HangPolicy())
    assert watch(progress, TWO, 100) == [(30, Hang(since_ns=9, after=30.0))]


def test_one_rank_that_moves_is_progress() -> None:
    progress = Progress(HangPolicy(after=5))
    for at in range(60):
        ranks = [View(0), View(1, records=100 + at // 4)]
        assert progress.look(ranks, 2, 1.0) is None


def test_a_completion_without_a_new_record_is_progress() -> None:
    progress = Progress(HangPolicy(after=5))
    assert not watch(progress, TWO, 5)
    later = [TWO[0], replace(TWO[1], last_ns=10)]
    assert [at for at, _ in watch(progress, later, 20)] == [5]


def test_long_steps_get_twenty_of_them() -> None:
    ranks = [replace(r, step_median_ns=6_000_000_000) for r in TWO]
    assert [at for at, _ in watch(Progress(HangPolicy()), ranks, 200)] == [120]


def test_before_the_first_step_patience_is_that_of_the_start_up() -> None:
    ranks = [replace(r, steps=0, step_median_ns=None) for r in TWO]
    assert [at for at, _ in watch(Progress(HangPolicy()), ranks, 400)] == [300]


def test_hang_after_holds_in_any_phase_once_a_rank_has_written() -> None:
    first = [replace(r, steps=0, step_median_ns=None) for r in TWO]
    saving = [replace(r, phase="checkpoint") for r in TWO]
    policy = HangPolicy(after=5)
    assert [at for at, _ in watch(Progress(policy), first, 20)] == [5]
    assert [at for at, _ in watch(Progress(policy), saving, 20)] == [5]
    importing = [replace(r, records=0, steps=0) for r in TWO]
    assert not watch(Progress(policy), importing, 250)


def test_a_checkpoint_may_be_silent_for_longer() -> None:
    ranks = [TWO[0], replace(TWO[1], phase="checkpoint")]
    assert [at for at, _ in watch(Progress(HangPolicy()), ranks, 400)] == [300]


def test_progress_after_a_hang_is_said_and_a_new_hang_counts_anew() -> None:
    progress = Progress(HangPolicy(after=5))
    assert len(watch(progress, TWO, 20)) == 1
    moved = [TWO[0], replace(TWO[1], records=101)]
    assert watch(progress, moved, 20) == [
        (0, Resumed(idle=19.0)),
        (5, Hang(since_ns=9, after=5)),
    ]


def test_no_ranks_and_a_job_that_is_ending_are_no_hang() -> None:
    assert not watch(Progress(HangPolicy(after=5)), [], 100)
    closed = [replace(r, closed=True) for r in TWO]
    assert not watch(Progress(HangPolicy(after=5)), closed, 100, alive=0)


def test_a_stopped_supervisor_does_not_count_as_silence() -> None:
    """The caller passes the time it watched; a gap of an hour adds one look's worth."""
    progress = Progress(HangPolicy(after=5))
    assert not watch(progress, TWO, 5)
    progress.excuse()
    assert [at for at, _ in watch(progress, TWO, 20)] == [4]


def test_only_the_newest_attempt_counts() -> None:
    ranks = [View(0), View(1), View(0, attempt=1)]
    assert current(ranks) == [ranks[2]]
