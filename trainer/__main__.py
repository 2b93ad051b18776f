"""`python -m trainer` (one process) or `torchrun --nproc-per-node N -m trainer` (N ranks).

In: `--config FILE` and `section.key=value` arguments. Out: banner and progress on rank 0's stdout,
or with --show-schedule the schedule of the pipeline in characters, and no training.
Exit 0 after the last step, 1 when the last checkpoint could not be written, 2 with one line a
problem when the configuration cannot work, 130 when interrupted. Torch is imported only once the
configuration is sound. A failure in training is left to be seen as it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from trainer.config import ConfigError
from trainer.settings import SHOW, load, read, usage

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.loop import StepResult


def main() -> int:
    """Read the configuration, train, say how it went; returns the exit status."""
    arguments = sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if {"-h", "--help"}.intersection(arguments):
        _say(usage(), rank)
        return 0
    try:
        if SHOW in arguments:
            _say(_schedule([one for one in arguments if one != SHOW], world), rank)
            return 0
        return _train(load(arguments, world), rank, world)
    except ConfigError as error:
        if rank == 0:
            for problem in error.problems:
                print(f"trainer: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if rank == 0:
            print("trainer: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _schedule(arguments: list[str], world: int) -> str:
    """The schedule in characters; without a launcher, on as many ranks as the axes ask for."""
    from trainer.banner import schedule_drawn

    asked = read(arguments).parallel
    ranks = max(1, asked.dp) * asked.tp * asked.pp * asked.cp
    return schedule_drawn(load(arguments, max(ranks, world)), max(ranks, world))


def _train(config: Config, rank: int, world: int) -> int:
    import torch

    from trainer import banner, progress, ranks
    from trainer.checkpoint.saver import Saver
    from trainer.loop import Trainer
    from trainer.metrics import Metrics

    metrics = Metrics(config.log.metrics) if config.log.metrics and rank == 0 else None
    device = ranks.pick_device(config.train.device)
    ranks.join(world, device, config.parallel.timeout)
    trainer = Trainer(config, world, device)
    own = sum(p.numel() for p in trainer.built.parameters.values())
    parameters = torch.zeros(world, dtype=torch.int64, device=device)
    parameters[rank] = own
    trainer.mesh.sum_over_world(parameters)
    _say(banner.banner(trainer, parameters.tolist()), rank)
    saver = Saver(trainer, say=partial(_say, rank=rank), warn=_warn)
    begin = saver.resume()
    if metrics:
        metrics.begin(begin)
    began = time.perf_counter()
    since: list[StepResult] = []
    first: StepResult | None = None
    fault = trainer.built.fault
    for number in range(begin, config.train.steps):
        if not fault.goes_on(number):
            break
        result = fault.around(trainer.step, number)
        if result is None:
            continue
        since.append(result)
        first = first or since[-1]
        if metrics:
            metrics.write(since[-1])
        last = number == config.train.steps - 1
        if number % config.log.every == 0 or last or since[-1].evaluation is not None:
            _say(progress.line(since, config.train.steps), rank)
            if last:
                _say(progress.ending(first, since[-1], time.perf_counter() - began), rank)
            since = []
        saver.after(number)
    if first is None:
        _say(f"nothing left to do: train.steps={config.train.steps} are done", rank)
    good = saver.close()
    if metrics:
        metrics.close()
    ranks.leave()
    return 0 if good else 1


def _warn(line: str) -> None:
    print(f"trainer: {line}", file=sys.stderr, flush=True)


def _say(text: str, rank: int) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
