"""What ZeRO-3 holds at once, and what lives on the host, in one process."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.test_training import TINY
from trainer.loop import Trainer
from trainer.parallel.prefetch import Prefetch
from trainer.parallel.unit import Unit
from trainer.settings import load

CPU = torch.device("cpu")
ON_HOST = ("parallel.zero=3", "memory.offload=parameters")
"""On one rank too, units are fetched for use and freed."""


class Piece:
    """A unit that notes what happens to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.here = name, log, False

    def fetch(self) -> None:
        if not self.here:
            self.log.append(f"+{self.name}")
        self.here = True

    def arrive(self) -> None:
        assert self.here
        self.log.append(self.name)

    def free(self) -> None:
        if self.here:
            self.log.append(f"-{self.name}")
        self.here = False


def step(order: Prefetch, units: dict[str, Piece], uses: str) -> str:
    """One use after the other; returns what happened."""
    log = next(iter(units.values())).log
    log.clear()
    order.start()
    for name in uses:
        order.use(units[name])
        order.done(units[name])
    order.end()
    return " ".join(log)


def made(ahead: int) -> tuple[Prefetch, dict[str, Piece]]:
    log: list[str] = []
    units = {name: Piece(name, log) for name in "abc"}
    return Prefetch(list(units.values()), ahead), units


@pytest.mark.parametrize(
    ("ahead", "warm"),
    [
        (0, "+a a -a +b b -b +c c -c +c c -c +b b -b +a a -a"),
        (1, "+a +b a -a +c b -b c +b c -c +a b -b a -a"),
        (2, "+a +b +c a -a b -b +b c +a c -c b -b a -a"),
    ],
)
def test_from_the_second_step_on_what_comes_next_is_fetched_and_kept(ahead: int, warm: str) -> None:
    order, units = made(ahead)
    assert step(order, units, "abccba") == "+a a -a +b b -b +c c -c +c c -c +b b -b +a a -a"
    assert step(order, units, "abccba") == warm
    assert step(order, units, "abccba") == warm


def test_a_step_of_another_order_is_served_when_asked_and_then_learned() -> None:
    order, units = made(1)
    step(order, units, "abc")
    assert step(order, units, "acb") == "+a +b a -a +c c -c b -b"
    assert step(order, units, "acb") == "+a +c a -a +b c -c b -b"


def test_outside_of_steps_nothing_is_fetched_early_and_nothing_learned() -> None:
    order, units = made(1)
    step(order, units, "abc")
    units["a"].log.clear()
    for name in "aab":
        order.use(units[name])
        order.done(units[name])
    assert " ".join(units["a"].log) == "+a a -a +a a -a +b b -b"
    assert step(order, units, "abc").startswith("+a +b a -a +c b")


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_bounded_number_of_units_is_here_at_once(
    ahead: int, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"parallel.prefetch={ahead}", f"memory.checkpoint={checkpoint}", "model.layers=6")
    run = Trainer(load([*TINY, *ON_HOST, *settings, "train.steps=3"], 1), 1, CPU)
    most = [0]
    real = Unit.fetch

    def fetch(unit: Unit) -> None:
        real(unit)
        most.append(sum(one.here for one in run.built.buckets.buckets))

    monkeypatch.setattr(Unit, "fetch", fetch)
    for number in range(3):
        run.step(number)
        assert not any(one.here for one in run.built.buckets.buckets)
    assert max(most) <= 2 + ahead
    held = [p.untyped_storage().nbytes() for p in run.built.parameters.values()]
    assert sum(held) == 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "where", [("memory.offload=optimizer",), ON_HOST, (*ON_HOST, "memory.checkpoint=full")]
)
def test_where_things_live_changes_no_bit(dtype: str, where: tuple[str, ...]) -> None:
    base = (*TINY, f"train.dtype={dtype}", "optim.clip=0")  # a norm's order of sums is its own

    def run(*settings: str) -> list[tuple[float, float]]:
        trainer = Trainer(load([*base, *settings], 1), 1, CPU)
        return [(r.loss, r.grad_norm) for r in (trainer.step(number) for number in range(4))]

    ours, plain = run(*where), run()
    assert [loss for loss, _ in ours] == [loss for loss, _ in plain]
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in plain], rel=1e-6)


def test_the_optimizer_holds_what_is_on_the_host() -> None:
    run = Trainer(load([*TINY, "memory.offload=optimizer"], 1), 1, CPU)
    run.step(0)
    host = {p.untyped_storage().data_ptr() for p in run.built.pieces.values()}
    here = {p.untyped_storage().data_ptr() for p in run.built.parameters.values()}
    assert not host & here
    for path, piece in run.built.pieces.items():
        whole = run.built.parameters[path].detach().flatten()
        start = run.built.buckets.starts[path]
        assert torch.equal(piece.detach(), whole[start : start + piece.numel()])
