"""Which model is trained: the trainer's own, or one from a file of yours (model.file).

Such a file is a Python program that you chose to run. It gives

    model()     a factory: an nn.Module from (batch, sequence) ids to (batch, sequence, vocabulary)
                logits, started as it likes; another name is told after a colon: my_model.py:small
    .chain()    optional, of the model: [(path, part)], each part taking what the one before
                returns; so pp, memory.checkpoint and zero=3 work by parts (an nn.Sequential is one)
    .width      optional, of the model: the last size of what passes between parts; so pp works
    PLAN        optional: {module path pattern: rule} as in parallel/plan.py; so tp and sp work

and cp works where attention is trainer.model.Attention, data.documents where parts that mix
positions take `documents` (trainer/documents.py) beside x. What the file does not give is refused
by name; what it raises is told as one line with its file and line.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.config import ConfigError
from trainer.model import Attention, Transformer, initial_value
from trainer.parallel import plan as plans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from trainer.config import Config
    from trainer.layout import Layout
    from trainer.parallel.plan import Plan


class ModelFileError(ConfigError):
    """What a user's file raised, as one line that names file and line."""


@dataclass(frozen=True)
class Blueprint:
    """A model before it is cut."""

    model: nn.Module
    """Whole; on the meta device, without memory, where `start` can make any value by itself."""
    chain: list[tuple[str, nn.Module]]
    """Its parts in the order in which data passes them, by path."""
    plan: Plan
    width: int
    """Size of the values between parts; 0 where the model does not say."""
    start: Callable[[str, torch.Size], Tensor] | None
    """The whole parameter of this path at the start; None: the model holds its values already."""


def draw(config: Config) -> Blueprint:
    """The model that the config asks for; ConfigError with what is wrong in the user's file."""
    if config.model.file:
        return _from_file(config.model.file, config.train.seed)
    with torch.device("meta"):
        model = Transformer(config.model)

    def start(path: str, shape: torch.Size) -> Tensor:
        return initial_value(path, shape, config.model.layers, config.train.seed)

    return Blueprint(model, model.chain(), plans.TRANSFORMER, model.width, start)


def problems(blueprint: Blueprint, config: Config, layout: Layout) -> list[str]:
    """What this layout needs and the user's file does not give, a line each."""
    if not config.model.file:
        return []  # the limits of the own model need no torch: layout.py has told them
    name, parallel = Path(config.model.file.partition(":")[0]).name, config.parallel
    found = []
    found += _chain_problems(blueprint, name)
    if config.model.dropout:
        found.append(
            f"model.dropout is of the trainer's own model, not of {name} (model.dropout=0)"
        )
    stages = layout.pp * parallel.virtual
    parts = len(blueprint.chain)
    if stages > parts or (stages > 1 and not blueprint.width):
        lacks = "says no width" if stages <= parts else f"has {parts} part(s) in its chain()"
        found.append(f"parallel.pp={layout.pp} makes {stages} stages, but {name} {lacks}")
    if layout.tp > 1:
        found += _tp_problems(blueprint, name, layout.tp)
    attentions = [type(one) for one in blueprint.model.modules() if isinstance(one, Attention)]
    if layout.cp > 1 and set(attentions) != {Attention}:
        found.append(
            f"parallel.cp={layout.cp} works on trainer.model.Attention itself, and {name} has "
            f"{'a class derived from it' if attentions else 'none'}"
        )
    if config.data.documents and not any(takes_documents(part) for _, part in blueprint.chain):
        found.append(f"data.documents=true, but no part of {name} takes documents in forward()")
    shared = _shared(blueprint.model)
    if shared and (stages > 1 or parallel.zero == 3):
        asked = "parallel.zero=3" if parallel.zero == 3 else f"parallel.pp={layout.pp}"
        found.append(f"{asked} parts {' and '.join(shared)}, which are one parameter in {name}")
    return found


def takes_documents(part: nn.Module) -> bool:
    """Whether positions see each other in this part, so that it asks for their documents."""
    return "documents" in inspect.signature(part.forward).parameters


def _chain_problems(blueprint: Blueprint, name: str) -> list[str]:
    """Whether the parts are the model: all of it, each under its own path."""
    known = dict(blueprint.model.named_modules())
    lost = [path for path, part in blueprint.chain if known.get(path) is not part]
    if lost:
        return [f"chain() of {name} calls a part {lost[0]!r}, which is not its path in the model"]
    bare = [path for path, part in blueprint.chain if not list(part.parameters())]
    if bare:
        return [f"part {bare[0]!r} of {name} has no parameters: join it to the part before it"]
    frozen = [path for path, p in blueprint.model.named_parameters() if not p.requires_grad]
    if frozen:
        return [f"{frozen[0]} of {name} asks for no gradient; the trainer trains all parameters"]
    held = {p for _, part in blueprint.chain for p in part.parameters()}
    left = [path for path, p in blueprint.model.named_parameters() if p not in held]
    return [f"{left[0]} of {name} belongs to no part of its chain()"] if left else []


def _tp_problems(blueprint: Blueprint, name: str, tp: int) -> list[str]:
    if not blueprint.plan:
        return [f"parallel.tp={tp} needs a PLAN in {name}: {{module path: rule}}"]
    found = [
        f"PLAN of {name}: {pattern!r} has the rule {rule!r}; known: {', '.join(plans.RULES)}"
        for pattern, rule in blueprint.plan.items()
        if rule not in plans.RULES
    ]
    if found:
        return found
    used = plans.rules(blueprint.model, blueprint.plan)
    if not used:
        found.append(f"PLAN of {name} names no module that the model has")
    kinds: dict[str, type[nn.Module]] = dict.fromkeys(("column", "row", "inner", "head"), nn.Linear)
    kinds["vocabulary"] = nn.Embedding
    for path, rule in used.items():
        module, kind = blueprint.model.get_submodule(path), kinds.get(rule)
        if kind is None:
            continue
        if type(module) is not kind:
            got = type(module).__name__
            found.append(f"PLAN of {name}: {rule} splits {kind.__name__}, and {path} is {got}")
        elif rule == "inner" and getattr(module, "bias", None) is not None:
            found.append(f"PLAN of {name}: inner would add the bias of {path} once a tp rank")
        elif (size := module.get_parameter("weight").shape[rule in {"row", "inner"}]) % tp:
            found.append(f"parallel.tp={tp} does not divide {size}, which {path} of {name} has")
    return found


def _shared(model: nn.Module) -> list[str]:
    """Paths of parameters that are one and the same as an earlier one, and that one."""
    first: dict[nn.Parameter, str] = {}
    for path, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(p, path) != path:
            return [first[p], path]
    return []


def _from_file(told: str, seed: int) -> Blueprint:
    path, _, factory = told.partition(":")
    with blamed(path):
        file = _load(Path(path))
        make = getattr(file, factory or "model", None)
        if not callable(make):
            raise ConfigError(
                [f"{path} has no function {factory or 'model'} (model.file=FILE:NAME)"]
            )
        torch.manual_seed(seed)
        model = make()
        if not isinstance(model, nn.Module):
            raise ConfigError([f"{path}: {make.__name__}() returns no torch.nn.Module"])
        chain = _chain(model)
    plan = getattr(file, "PLAN", {})
    if not isinstance(plan, dict) or not all(isinstance(w, str) for p in plan.items() for w in p):
        raise ConfigError([f"{path}: PLAN is not {{module path: rule}}, both text"])
    return Blueprint(model, chain, plan, int(getattr(model, "width", 0)), None)


def _chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    told = getattr(model, "chain", None)
    if callable(told):
        return list(told())
    if type(model) is nn.Sequential:
        return list(model.named_children())
    return [("", model)]


def _load(path: Path) -> Any:
    """The user's file as a module; its folder is on sys.path, as it is when Python runs it."""
    if not path.is_file():
        raise ConfigError([f"there is no file {path} (model.file=FILE or FILE:FACTORY)"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError([f"{path} is no Python file (model.file=FILE.py)"])
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def blamed(told: str) -> Iterator[None]:
    """Turns what the user's file raises into a ModelFileError.

    An error that never passed through that file is not its fault, and stays as it is.
    """
    path = Path(told.partition(":")[0])
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        where = _place(error, path.resolve())
        if where is None:
            raise
        message = " ".join(str(getattr(error, "msg", error)).split())
        raise ModelFileError([f"{path}:{where}: {type(error).__name__}: {message}"]) from error


def _place(error: Exception, path: Path) -> int | None:
    """The innermost line of the file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == path:
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path
    ]
    return lines[-1] if lines else None
