"""Layers to stages: a wrong list is refused with the nearest, a balanced one has no better."""

from __future__ import annotations

import itertools
import random

import pytest

from trainer.config import ConfigError
from trainer.layout import Layout
from trainer.mesh import Mesh, build
from trainer.parallel import balance
from trainer.settings import load
from trainer.split import Load, Loads, balanced, even, listed, nearest, need
from trainer.stages import told


def refused(*arguments: str, world: int) -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(arguments), world)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("parallel.split=1,2",), "has 3 layers of 4 (model.layers) (parallel.split=1,3)"),
        (("parallel.split=2,1,1",), "names 3 stage(s), and there are 2 (parallel.split=3,1)"),
        (("parallel.split=0,4",), "leaves a stage without a layer (parallel.split=1,3)"),
        (("parallel.split=4",), "names 1 stage(s), and there are 2 (parallel.split=2,2)"),
        (("parallel.split=evn",), "is not even, measured or layers by stage"),
        (("parallel.split=1,x",), "is not even, measured or layers by stage"),
        (("memory.checkpoint=full,none,none",), "(memory.checkpoint=full,none, or one word"),
        (("memory.checkpoint=half,every-0",), "memory.checkpoint=half is not none, full"),
        (("memory.limit=1000",), "memory.limit=1000 is what a measured split keeps to"),
        (("model.dropout=1",), "model.dropout=1 must be below 1"),
        (("model.dropout=-0.1",), "model.dropout=-0.1 must be 0 or more"),
    ],
)
def test_what_does_not_fit_the_stages_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("parallel.pp=2", *arguments, world=2)


def test_the_nearest_split_fits_and_keeps_the_shape() -> None:
    for layers, stages in itertools.product(range(1, 9), range(1, 9)):
        if stages > layers:
            continue
        for counts in itertools.product(range(4), repeat=3):
            found = nearest(counts, layers, stages)
            assert len(found) == stages
            assert sum(found) == layers
            assert min(found) >= 1
    assert nearest([2, 4, 2], 16, 3) == [4, 8, 4] or sum(nearest([2, 4, 2], 16, 3)) == 16
    assert nearest([1, 2, 1], 4, 3) == [1, 2, 1]


def test_balanced_is_the_best_of_all_splits() -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    for _ in range(60):
        layers, stages = dice.randint(1, 8), dice.randint(1, 4)
        if stages > layers:
            continue

        def one() -> Load:
            return Load(dice.uniform(1, 5), dice.uniform(1, 5), dice.uniform(0, 2))

        loads = Loads(tuple(one() for _ in range(layers)), (one(),), (one(), one()))
        flight = [dice.randint(1, 4) for _ in range(stages)]
        limit = dice.choice([0.0, dice.uniform(10, 60)])
        found = balanced(loads, flight, limit)
        best = None
        for cuts in itertools.combinations(range(1, layers), stages - 1):
            ends = [0, *cuts, layers]
            split = [range(a, b) for a, b in itertools.pairwise(ends)]
            needs = [need(loads, own, at, flight) for at, own in enumerate(split)]
            if not limit or max(size for _, size in needs) <= limit:
                slowest = max(seconds for seconds, _ in needs)
                best = slowest if best is None else min(best, slowest)
        if best is None:
            assert found is None, f"seed {seed}"
        else:
            assert found is not None, f"seed {seed}"
            ours = max(need(loads, own, at, flight)[0] for at, own in enumerate(found))
            assert ours == pytest.approx(best), f"seed {seed}"


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    layer, head = Load(1.0, 1.0, 1.0), Load(2.0, 1.0, 1.0)
    loads = Loads((layer,) * 6, (), (head,))
    assert balanced(loads, [2, 1]) == [range(4), range(4, 6)]
    assert balanced(loads, [2, 1], limit=10.0) == [range(3), range(3, 6)]
    assert balanced(loads, [2, 1], limit=7.0) is None


def alone() -> Mesh:
    return build(Layout(dp=1, tp=1, pp=1), ("pp", "dp", "tp"), balance.torch.device("cpu"), 1.0)


def test_a_limit_that_no_split_keeps_to_names_the_least_that_works() -> None:
    layer = Load(1.0, 100.0, 10.0)
    loads = Loads((layer,) * 4, (layer,), (layer,))
    cpu = balance.torch.device("cpu")
    with pytest.raises(ConfigError) as caught:
        balance.choose(loads, [2, 1], 200, alone(), cpu)
    assert "(memory.limit=360," in caught.value.problems[0]
    assert balance.choose(loads, [2, 1], 360, alone(), cpu) == [range(2), range(2, 4)]


def test_what_is_told_costs_as_many_layers_and_those_that_come_twice() -> None:
    config = load(["parallel.pp=2", "parallel.split=3,1", "memory.checkpoint=full,none"], 2)
    layers, costs = told(config, ["embed", *(f"layers.{i}" for i in range(4)), "norm"], 2)
    assert layers == listed([3, 1]) != even(4, 2)
    by_name = {(kind.value, stage): cost for (kind, stage), cost in costs.items()}
    assert by_name["F", 0] == by_name["W", 0] == 3
    assert by_name["B", 0] == 9
    assert by_name["I", 0] == 6
    assert by_name["B", 1] == 2
