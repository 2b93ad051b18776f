"""The taxonomy and the classes of errors: loaded, whole, and as the design has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from playbooks import knowledge
from playbooks.rules.stall import WHERE

HERE = Path(knowledge.__file__).parent / "taxonomy.yaml"


def test_every_cause_is_complete() -> None:
    known = knowledge.causes()
    assert len(known) > 50
    for identifier, cause in known.items():
        assert re.fullmatch(r"(hang|crash|oom|slow|link|numeric|config)\.[a-z0-9-]+", identifier)
        assert cause.title
        assert cause.advice
        assert cause.decides


def test_look_alikes_are_causes_of_the_taxonomy() -> None:
    known = knowledge.causes()
    for cause in known.values():
        for other, because in cause.look_alikes():
            assert other in known, f"{cause.id} names {other}"
            assert because


def test_advice_for_a_place_comes_first_and_nothing_is_lost() -> None:
    cause = knowledge.cause("hang.rank-stalled")
    assert cause.advice_for("data")[0].startswith("data:")
    assert cause.advice_for("evaluation")[0].startswith("checkpoint, evaluation:")
    assert sorted(cause.advice_for("compile")) == sorted(cause.advice)
    assert cause.advice_for(None) == cause.advice


def test_phases_map_to_places_of_the_taxonomy() -> None:
    assert set(WHERE.values()) <= set(knowledge.cause("hang.rank-stalled").reasons)


def test_the_taxonomy_is_that_of_the_design() -> None:
    design = Path(__file__).parents[3] / "shared" / "design" / "taxonomy.yaml"
    if not design.exists():
        pytest.skip("the design folder is not beside this checkout")
    assert HERE.read_text() == design.read_text()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RuntimeError: ... Connection closed by peer [10.0.0.1]:99", "peer"),
        ("RuntimeError: Connection reset by peer. This is typically caused", "peer"),
        ("torch.distributed.DistBackendError: NCCL error in: x", "peer"),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", "timeout"),
        ("torch.distributed.DistStoreError: Socket Timeout", "timeout"),
        ("KeyboardInterrupt: ", "interrupted"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB", "memory"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 3.64 TiB for an array",
         "memory"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", "memory"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "launcher"),
        ("RuntimeError: Detected mismatch between collectives on ranks.", "mismatch"),
        ("OSError: [Errno 122] Disk quota exceeded", "storage"),
        ("KeyError: 'x'", "program"),
        ("ValueError: connection string is empty", "program"),
    ],
)  # fmt: skip
def test_errors_are_read_for_what_they_are(text: str, name: str) -> None:
    assert knowledge.classify(text).name == name


def test_classes_name_causes_of_the_taxonomy() -> None:
    for kind, _pattern in knowledge._patterns():
        assert kind.cause is None or kind.cause in knowledge.causes()


def test_a_misspelt_cause_is_an_error_and_has_neighbours() -> None:
    with pytest.raises(KeyError):
        knowledge.cause("hang.rank-dead")
    assert knowledge.nearest("hang.rank-dead")[0] == "hang.rank-died"
    assert "slow.straggler-compute" in knowledge.nearest("straggler")
