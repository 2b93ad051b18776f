"""Every fault does what it says, on the ranks and at the step that are named, and nothing else.

What the faults of one process do stands in test_training.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from tests.trainer.faulty import Faulty, Seen, train
from trainer import faults
from trainer.config import ConfigError, FaultConfig
from trainer.loop import Trainer
from trainer.mesh import Axis, Mesh, one_rank
from trainer.parity.pool import Pool
from trainer.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STEPS, AT = 3, 1
TINY = (
    "train.device=cpu",
    f"train.steps={STEPS}",
    "train.global_batch=4",
    "train.microbatch=1",
    "train.sequence=32",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.mlp=64",
)
EXPERTS = ("model.experts=4", "model.top_k=1", "model.balance=0")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., list[Seen]]]:
    """Train on two ranks; without a fault the answer is kept."""
    pool, healthy = Pool(train), dict[tuple[str, ...], list[Seen]]()

    def answer(*settings: str, silent: int = 1 << 30) -> list[Seen]:
        if not settings or not settings[0].startswith("faults."):
            if settings not in healthy:
                healthy[settings] = pool.run(Faulty((*TINY, *settings)), 2)
            return healthy[settings]
        return pool.run(Faulty((*TINY, *settings), silent), 2)

    yield answer
    pool.close()


def _fault(kind: str, rank: int = 1) -> tuple[str, ...]:
    return f"faults.kind={kind}", f"faults.rank={rank}", f"faults.step={AT}"


def _losses(seen: Seen) -> list[float]:
    return [result.loss for result in seen.results]


def test_without_a_fault_both_ranks_do_the_same(run: Callable[..., list[Seen]]) -> None:
    first, second = run()
    assert first.calls == second.calls
    assert _losses(first) == _losses(second)
    assert len(first.results) == STEPS
    assert first.weights == second.weights
    assert not (first.struck or second.struck)


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("collective-mismatch", 1),
        ("collective-dtype", 1),
        ("collective-order", 1),
        ("collective-extra", 1),
        ("collective-missing", 0),
        ("rank0-collective", 0),
        ("exception-swallowed", 1),
        ("uneven-inputs", 1),
    ],
)
def test_what_ranks_do_together_breaks_at_the_step_and_not_before(
    run: Callable[..., list[Seen]], kind: str, rank: int
) -> None:
    healthy = run()[0]
    seen = run(*_fault(kind, rank), silent=AT)
    odd, peer = seen[rank], seen[1 - rank]
    assert (odd.struck, peer.struck) == (True, False)
    assert _losses(odd)[:AT] == _losses(peer)[:AT] == _losses(healthy)[:AT]
    assert odd.calls[:AT] == peer.calls[:AT] == healthy.calls[:AT]
    usual = healthy.calls[AT]
    total = usual[-1]
    if kind == "uneven-inputs":
        assert len(odd.calls) == AT, "it begins no step more"
        assert peer.calls[AT][: len(usual)] == usual
        return
    mine = {  # what it issues in the step, or before what is left open
        "collective-mismatch": [*usual[:-1], (total[0], 2 * total[1], total[2])],
        "collective-dtype": [*usual[:-1], (total[0], total[1], "torch.float32")],
        "collective-order": [total],
        "collective-extra": [*usual[:-1], (total[0], 1, total[2])],
        "collective-missing": usual[:-1],
        "rank0-collective": [*usual, ("barrier", 0, "torch.float32")],
        "exception-swallowed": usual[:1],
    }[kind]
    assert odd.calls[AT][: len(mine)] == mine
    assert peer.calls[AT] == usual, "a peer does what it always does"
    if kind in {"collective-missing", "exception-swallowed"}:
        assert odd.calls[AT] == mine
        assert len(odd.calls) == STEPS, "it went on to the next step"


def test_a_caught_error_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    seen = train(Faulty((*TINY, *_fault("exception-swallowed", 0))), 1)
    assert [result.step for result in seen.results] == [0, 2]
    assert f"step {AT}: out of memory, skipping batch: " in capsys.readouterr().err


def test_one_module_of_one_rank_gives_nan_and_all_have_it_after_the_sum(
    run: Callable[..., list[Seen]],
) -> None:
    healthy, second = run()
    there = run(*_fault("nan"), "faults.module=layers.1.mlp")
    assert _losses(there[0])[:AT] == _losses(healthy)[:AT]
    assert all(math.isnan(one.results[AT].loss) for one in there)
    assert there[0].own_losses[AT] == healthy.own_losses[AT]
    assert math.isnan(there[1].own_losses[AT])
    assert there[1].own_losses[:AT] == second.own_losses[:AT]


def test_a_module_that_the_rank_has_not_is_refused_by_all() -> None:
    settings = [*TINY, *_fault("nan", 0), "faults.module=layers.2.mlp"]
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp is no module of rank 0, which has .*"):
        Trainer(load(settings, 1), 1, torch.device("cpu"))


def test_replicas_part_when_one_does_not_take_the_sum(run: Callable[..., list[Seen]]) -> None:
    apart = run(*_fault("replicas-apart"))
    assert apart[1].weights != apart[0].weights
    assert apart[0].calls == apart[1].calls, "it joins every sum"
    assert _losses(apart[0])[: AT + 1] == _losses(run()[0])[: AT + 1]


def test_a_sum_instead_of_a_mean_is_wrong_by_the_replicas(run: Callable[..., list[Seen]]) -> None:
    healthy = run()[0]
    wrong = run("faults.kind=sum-not-mean", f"faults.step={AT}")
    assert all(one.struck for one in wrong)
    for step in range(AT + 1):
        ours, theirs = wrong[0].results[step], healthy.results[step]
        assert ours.loss == theirs.loss
        assert ours.grad_norm == pytest.approx(theirs.grad_norm * (2 if step == AT else 1))


@pytest.mark.parametrize("layout", [(), ("parallel.ep=2",)])
def test_experts_collapse_and_overflow(
    run: Callable[..., list[Seen]], layout: tuple[str, ...]
) -> None:
    healthy = run(*EXPERTS, *layout)[0]
    collapsed = run("faults.kind=router-collapse", f"faults.step={AT}", *EXPERTS, *layout)[0]
    full = run("faults.kind=capacity-overflow", f"faults.step={AT}", *EXPERTS, *layout)[0]
    for seen in (collapsed, full):
        assert _losses(seen)[:AT] == _losses(healthy)[:AT]
    assert max(healthy.results[AT].load[0].shares) < 0.9
    for result in collapsed.results[AT:]:
        assert all(one.shares[0] == 1 for one in result.load)
    assert healthy.results[AT].load[0].dropped == 0
    for result in full.results[AT:]:
        assert all(one.dropped >= 0.5 for one in result.load)


def test_memory_grows_by_what_leaks_in_every_step() -> None:
    settings = ("faults.kind=leak", f"faults.step={AT}", f"faults.bytes={64 << 20}")
    held = [result.memory[0] for result in train(Faulty((*TINY, *settings)), 1).results]
    assert held[1] - held[0] >= 48 << 20
    assert held[2] - held[1] >= 48 << 20


def test_late_data_are_late_in_every_step_from_there_on_and_the_same() -> None:
    healthy = train(Faulty(TINY), 1)
    slow = train(Faulty((*TINY, "faults.kind=slow-data", f"faults.step={AT}")), 1)
    assert _losses(slow) == _losses(healthy)
    assert all(result.seconds > 0.2 for result in slow.results[AT:])


def test_rank_0_writes_what_it_holds_while_others_would_wait(
    run: Callable[..., list[Seen]], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    monkeypatch.setattr(torch, "save", lambda what, _file: written.append(what))
    config = FaultConfig(kind="rank0-work", step=AT, seconds=0.01)
    trainer = Trainer(load(list(TINY), 1), 1, torch.device("cpu"))
    fault = faults.make(config, 0, trainer.device)
    fault.install(trainer)
    for number in range(STEPS):
        fault.begin(number, trainer.loader)
        before = len(written)
        result = fault.around(trainer.step, number)
        assert result is not None
        assert _losses(run()[0])[number] == pytest.approx(result.loss)
        assert (len(written) > before) == (number == AT)


def test_one_direction_of_a_pass_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    monkeypatch.setattr(faults.slow.Straggler, "_compute", lambda _self: computed.append("x"))
    for kind, expected in (("slow-forward", 1), ("slow-backward", 2), ("straggler", 4)):
        fault = faults.make(FaultConfig(kind=kind), 0, torch.device("cpu"))
        fault.in_forward(0)
        if kind == "slow-backward":
            assert len(computed) == 1, "not in forward"
        fault.in_backward(0)
        assert len(computed) == expected


def test_an_epoch_has_the_order_of_the_first_one(text: Path) -> None:
    settings = (*TINY, f"data.path={text}", "train.steps=1000")
    cpu = torch.device("cpu")
    healthy = Trainer(load(list(settings), 1), 1, cpu).loader
    broken = Trainer(load([*settings, "faults.kind=no-set-epoch"], 1), 1, cpu)
    broken.step(0)
    epoch = broken.loader.trained
    first = [broken.loader.window(number) for number in range(epoch)]
    assert first == [broken.loader.window(number + epoch) for number in range(epoch)]
    assert first == [healthy.window(number) for number in range(epoch)]
    assert first != [healthy.window(number + epoch) for number in range(epoch)]
    with pytest.raises(ConfigError, match="none begins after the first"):
        Trainer(load([*TINY, "faults.kind=no-set-epoch"], 1), 1, cpu)


def _mesh(rank: int) -> Mesh:
    """pp2 x dp2 x cp1 x tp2, as rank `rank` sees it."""
    at = {"pp": rank // 4, "dp": rank // 2 % 2, "tp": rank % 2}
    axes = {name: Axis(name, 2, index, (0, 1), None) for name, index in at.items()}
    one = one_rank("dp", rank)
    return Mesh(axes, rank, 8, axes["dp"], one, one, one, one, one, one)


@pytest.mark.parametrize(
    ("kind", "struck"),
    [
        ("straggler", {5}),
        ("slow-stage", {4, 5, 6, 7}),
        ("uneven-inputs", {0, 1, 4, 5}),
        ("replicas-apart", {0, 1, 4, 5}),
        ("sum-not-mean", set(range(8))),
    ],
)
def test_a_fault_strikes_the_rank_or_those_that_belong_to_it(kind: str, struck: set[int]) -> None:
    config, cpu = FaultConfig(kind=kind, rank=5), torch.device("cpu")
    made = {rank: faults.make(config, rank, cpu, _mesh(rank)) for rank in range(8)}
    assert {rank for rank, fault in made.items() if type(fault) is not faults.Fault} == struck


@pytest.mark.parametrize(
    ("world", "settings", "why"),
    [
        (1, ("faults.kind=collective-extra",), "needs peers"),
        (2, ("faults.kind=rank0-work", "faults.rank=1"), "faults.rank=0"),
        (2, ("faults.kind=sum-not-mean", "faults.rank=1"), "faults.rank=0"),
        (2, ("faults.kind=slow-stage",), "parallel.pp=2"),
        (2, ("faults.kind=uneven-inputs", "parallel.tp=2"), "parallel.dp=2"),
        (2, ("faults.kind=replicas-apart", "parallel.tp=2"), "parallel.dp=2"),
        (2, ("faults.kind=replicas-apart", "parallel.zero=1"), "parallel.zero=0"),
        (2, ("faults.kind=router-collapse",), "model.experts=8"),
        (2, ("faults.kind=collective-order",), "faults.step=1"),
        (2, ("faults.kind=oom", "faults.module=head"), "faults.kind=nan"),
        (
            2,
            ("faults.kind=nan", "faults.module=layers.0.mlp.experts.3", "parallel.ep=2", *EXPERTS),
            "faults.module=layers.0.mlp)",
        ),
    ],
)
def test_a_fault_that_makes_no_sense_there_is_refused_in_a_line(
    world: int, settings: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load([*TINY, *settings], world)
    assert [why in line for line in refused.value.problems] == [True]
