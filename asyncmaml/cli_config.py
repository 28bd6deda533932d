"""The fields of `TrainConfig` as flags, and what comes of the flags, presets and files."""

import argparse
from pathlib import Path
from typing import Any

from asyncmaml.cli_options import keyword, reader
from asyncmaml.config import LEARNERS, Option, TrainConfig, options
from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Choice, Flag, Keywords, Kind, OrNone

_TITLES = {
    "run": "run",
    "environment": "environment",
    "policy": "policy",
    "learner": "learner",
    **{name: f"learner {name}" for name in LEARNERS},
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field; a field that no flag names is not in the parsed result."""
    groups = {
        group: parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
        for group, title in _TITLES.items()
    }
    for option in options():
        _add_flag(groups[option.group], option)


def _add_flag(group: "argparse._ArgumentGroup", option: Option) -> None:
    flag = "--" + option.name.replace("_", "-")
    names = ""
    kind = option.kind.one if isinstance(option.kind, OrNone) else option.kind
    if isinstance(kind, Choice) and _metavar(kind) == "NAME":
        names = ": " + ", ".join(kind.names)
    text = f"{option.help}{names}; default: {_text(option.default)}"
    if isinstance(option.kind, Keywords):
        group.add_argument(
            "-k",
            "--env-kwarg",
            dest=option.name,
            action="append",
            type=keyword,
            metavar=option.kind.metavar,
            help=f"{option.help}, beside those of the preset; the value is JSON, or else text; "
            "repeat it for more",
        )
    elif isinstance(option.kind, Flag):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(flag, type=reader(option.kind), metavar=_metavar(option.kind), help=text)


def _metavar(kind: Kind) -> str:
    """A long list of names would push the help off the line; the help tells them then."""
    return kind.metavar if len(kind.metavar) < 20 else "NAME"


def _text(value: Any) -> str:
    """Return a default as one would write it behind its flag."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def config_of(parsed: argparse.Namespace) -> TrainConfig:
    """Return what a preset, a file or the run to resume says, with what the flags say over it.

    Raises:
        ConfigurationError: None of them is named, or more than one, or a value is no good.
    """
    config = _base(parsed)
    changes = {
        option.name: getattr(parsed, option.name)
        for option in options()
        if hasattr(parsed, option.name)
    }
    if "env_kwargs" in changes:
        changes["env_kwargs"] = {**config.env_kwargs, **dict(changes["env_kwargs"])}
    return config.replace(**changes)


def _base(parsed: argparse.Namespace) -> TrainConfig:
    kept: Path = parsed.output / "config.json"
    if parsed.preset is not None and parsed.config is not None:
        message = "a PRESET and --config were given; leave one of them out"
        raise ConfigurationError(message)
    if parsed.preset is not None:
        return TrainConfig.preset(parsed.preset)
    if parsed.config is not None:
        return TrainConfig.load(parsed.config)
    if parsed.resume and kept.is_file():
        return TrainConfig.load(kept)
    message = "what to train is not said: name a PRESET, a --config, or a run with --resume"
    if parsed.resume:
        message = f"there is no run to resume in {parsed.output}: it has no config.json"
    raise ConfigurationError(message)
