"""From the command line to a checked Config.

In: arguments (`--config FILE`, `section.key=value` ...) and the world size. Out: a Config, or
ConfigError with every problem at once, each with the flag to change.
Later arguments win over earlier ones, arguments over the file, the file over the defaults.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import tomllib
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from trainer import config as config_file
from trainer.config import Config, ConfigError
from trainer.layout import problems as layout_problems

_SECTIONS: dict[str, Any] = {field.name: type(field.default) for field in fields(Config)}
_ZERO_IS_FINE = {
    "data.end",
    "parallel.dp",
    "parallel.zero",
    "model.dropout",
    "memory.limit",
    "parallel.prefetch",
    "model.experts",
    "model.capacity",
    "model.balance",
    "eval.every",
    "optim.base_batch",
    "optim.warmup",
    "optim.clip",
    "optim.weight_decay",
    "optim.lr_final",
    "optim.beta1",
    "optim.beta2",
    "train.seed",
    "checkpoint.every",
    "faults.rank",
    "faults.step",
    "faults.seconds",
    "faults.bytes",
}
_BELOW_ONE = {
    "optim.beta1",
    "optim.beta2",
    "optim.decay",
    "scale.backoff",
    "eval.held",
    "model.dropout",
}
_NONE = {"data.end": -1}
"""Values below 0 that mean: none."""


SHOW = "--show-schedule"
"""Draws instead of training."""


def load(arguments: list[str], world: int) -> Config:
    """The Config that these arguments ask for on `world` ranks.

    Raises ConfigError with every problem found. What cannot be read counts with its default, and
    layouts are judged only where all values are in range, since one of nonsense would add nonsense.
    """
    config, found = _spelled(arguments)
    found += _range_problems(config, world) or layout_problems(config, world)
    if found:
        raise ConfigError(found)
    return config


def read(arguments: list[str]) -> Config:
    """The Config that these arguments spell, whether it can work or not.

    Raises ConfigError for unknown keys, and for values of the wrong kind.
    """
    config, found = _spelled(arguments)
    if found:
        raise ConfigError(found)
    return config


def _spelled(arguments: list[str]) -> tuple[Config, list[str]]:
    """(the Config of all that could be read, what could not)."""
    values: dict[str, Any] = {}
    found: list[str] = []
    paths, pairs = _split(arguments, found)
    for path in paths:
        values.update(_read(Path(path), found))
    for key, text in pairs:
        values[key] = _parse(text)
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for key, value in values.items():
        _place(key, value, sections, found)
    return Config(**{name: _SECTIONS[name](**given) for name, given in sections.items()}), found


def usage() -> str:
    """Every key with its default and what it means, from the docstrings under the fields."""
    lines = [
        "usage: python -m trainer [--config FILE] [section.key=value ...]",
        "       torchrun --nproc-per-node N -m trainer [--config FILE] [section.key=value ...]",
        "       python -m trainer --show-schedule [--config FILE] [section.key=value ...]",
    ]
    for section, owner in _SECTIONS.items():
        lines += ["", f"{section}: {inspect.getdoc(owner)}"]
        documented = _docstrings(owner)
        for field in fields(owner):
            default = _show(field.default)
            default = default.lower() if isinstance(field.default, bool) else default
            lines.append(f"  {section}.{field.name}={default}")
            lines += [f"      {line.strip()}" for line in documented[field.name].splitlines()]
            if choices := field.metadata.get("choices"):
                lines.append(f"      one of: {', '.join(map(str, choices))}")
    return "\n".join(lines)


def _split(arguments: list[str], found: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    paths: list[str] = []
    pairs: list[tuple[str, str]] = []
    rest = iter(arguments)
    for one in rest:
        if one == "--config":
            path = next(rest, None)
            if path is None:
                found.append("--config needs a file (--config trainer/configs/small.toml)")
            else:
                paths.append(path)
        elif one.startswith("--config="):
            paths.append(one.removeprefix("--config="))
        elif "=" in one and not one.startswith("-"):
            key, _, text = one.partition("=")
            pairs.append((key, text))
        else:
            found.append(f"{one!r} is neither --config FILE nor section.key=value (try --help)")
    return paths, pairs


def _read(path: Path, found: list[str]) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        found.append(f"cannot read {path}: {error.strerror} (--config FILE)")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        found.append(f"{path} is not TOML: {error} (--config FILE)")
        return {}
    values: dict[str, Any] = {}
    for section, table in tree.items():
        if isinstance(table, dict):
            values.update({f"{section}.{key}": value for key, value in table.items()})
        else:
            found.append(f"{path}: {section} stands outside a [section]")
    return values


def _parse(text: str) -> Any:
    """A TOML value where the text is one, else the text itself; 1,2 and a,b are lists."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [_parse(part.strip()) for part in text.split(",")] if "," in text else text


def _place(key: str, value: Any, sections: dict[str, dict[str, Any]], found: list[str]) -> None:
    """Put one value where it belongs, as the type that its field has."""
    section, _, name = key.partition(".")
    known = (
        {field.name: field for field in fields(_SECTIONS[section])} if section in sections else {}
    )
    if name not in known:
        everything = [f"{s}.{f.name}" for s, owner in _SECTIONS.items() for f in fields(owner)]
        near = difflib.get_close_matches(key, everything, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "--help lists all"
        found.append(f"unknown key {key}; {hint}")
        return
    kind = get_type_hints(_SECTIONS[section])[name]
    try:
        converted = _convert(value, kind)
    except ValueError as error:
        found.append(f"{key}={_show(value)} {error}")
        return
    choices = known[name].metadata.get("choices")
    if choices and converted not in choices:
        near = difflib.get_close_matches(str(converted), map(str, choices), n=1, cutoff=0.4)
        hint = f"; did you mean {key}={near[0]}?" if near else ""
        found.append(f"{key}={converted} is not one of {', '.join(map(str, choices))}{hint}")
        return
    sections[section][name] = converted


def _convert(value: Any, kind: Any) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is str and not isinstance(value, list | dict):
        return str(value)
    if kind == tuple[str, ...] and not isinstance(value, dict):
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(
        kind, "a list of words"
    )
    raise ValueError(f"must be {wanted}")


def _range_problems(config: Config, world: int) -> list[str]:
    """Numbers outside what they can mean, and a fault that would never happen."""
    found = []
    for section, owner in _SECTIONS.items():
        for field in fields(owner):
            key = f"{section}.{field.name}"
            value = getattr(getattr(config, section), field.name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if not math.isfinite(value):
                found.append(f"{key}={value} must be a finite number")
            elif key in _NONE and value == _NONE[key]:
                continue
            elif value < 0 or (value == 0 and key not in _ZERO_IS_FINE):
                least = "0 or more" if key in _ZERO_IS_FINE else "more than 0"
                found.append(f"{key}={_show(value)} must be {least}")
            elif value >= 1 and key in _BELOW_ONE:
                found.append(f"{key}={_show(value)} must be below 1")
    faults = config.faults
    if faults.kind != "none" and faults.rank >= world:
        found.append(f"faults.rank={faults.rank} is not one of {world} ranks (0 to {world - 1})")
    if faults.kind != "none" and faults.step >= config.train.steps:
        found.append(
            f"faults.step={faults.step} is never reached in train.steps={config.train.steps}"
        )
    return found


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _docstrings(owner: type) -> dict[str, str]:
    """The string under each field; Python itself forgets them, the source does not."""
    tree = ast.parse(inspect.getsource(config_file))
    body = next(
        n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner.__name__
    )
    texts = {}
    for here, below in pairwise(body):
        if (
            isinstance(here, ast.AnnAssign)
            and isinstance(here.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            texts[here.target.id] = str(below.value.value)
    return texts
