"""Configurations of tristandeleu/pytorch-maml-rl (`configs/maml/*.yaml`), in our words.

Their keys that are not ours are `env-name`, `env-kwargs`, `fast-batch-size`, `fast-lr`,
`num-steps`, `num-batches`, `meta-batch-size`, `cg-iters`, `ls-max-steps` and `ls-backtrack-ratio`;
the others differ in the hyphen alone. Ours may stand beside them.
"""

import re
from collections.abc import Mapping
from typing import Any

from asyncmaml.errors import ConfigurationError, MissingExtraError

_FIELDS = {
    "fast-batch-size": "episodes_per_task",
    "meta-batch-size": "tasks_per_iteration",
    "num-batches": "iterations",
    "cg-iters": "cg_iterations",
    "ls-max-steps": "line_search_steps",
    "ls-backtrack-ratio": "line_search_ratio",
}
_ENVIRONMENTS = {
    "2DNavigation": "asyncmaml/Navigation2D-v0",
    "TabularMDP": "asyncmaml/TabularMDP-v0",
    "HalfCheetahDir": "asyncmaml/HalfCheetahDir-v0",
    "HalfCheetahVel": "asyncmaml/HalfCheetahVel-v0",
    "AntDir": "asyncmaml/AntDir-v0",
    "AntVel": "asyncmaml/AntVel-v0",
    "AntPos": "asyncmaml/AntGoal-v0",
}
_BANDIT = re.compile(r"Bandit-K(\d+)-v\d+")


def fields_of_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that a YAML file sets.

    Args:
        text: The file's.
        where: The file's name, for messages.

    Raises:
        ConfigurationError: It is no YAML or holds no mapping, or sets one thing twice.
        MissingExtraError: PyYAML is not installed.
    """
    content = _read(text, where)
    fields: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key)
        if name == "env-name":
            fields |= _environment(str(value))
        elif name == "nonlinearity":
            fields[name] = str(value).lower()  # some of their files say "Tanh"
        elif name not in ("env-kwargs", "fast-lr", "num-steps"):
            fields[_FIELDS.get(name, name.replace("-", "_"))] = value
    if "env-kwargs" in content:
        _set_keywords(fields, dict(content["env-kwargs"] or {}))
    if "fast-lr" in content or "num-steps" in content:
        if "step_sizes" in fields:
            message = f"{where} has step_sizes beside fast-lr or num-steps; leave one of them out"
            raise ConfigurationError(message)
        fields["step_sizes"] = [content.get("fast-lr", 0.5)] * int(content.get("num-steps", 1))
    return fields


def _read(text: str, where: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        message = f"{where} is YAML, which needs PyYAML; run pip install 'asyncmaml[cli]'"
        raise MissingExtraError(message) from error
    try:
        content = yaml.load(text, _loader(yaml))
    except yaml.YAMLError as error:
        message = f"{where} holds no configuration: it is no YAML, {error}"
        raise ConfigurationError(message) from error
    if not isinstance(content, Mapping):
        message = f"{where} holds no configuration: wanted a mapping, found {content!r}"
        raise ConfigurationError(message)
    return dict(content)


def _loader(yaml: Any) -> Any:
    """A safe loader that reads 1e-2 as a number: YAML 1.1, which PyYAML follows, wants 1.0e-2."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def _environment(name: str) -> dict[str, Any]:
    """Return our environment of that name; a name that is not one of theirs is left as it is."""
    bandit = _BANDIT.fullmatch(name)
    if bandit is not None:
        return {"env_id": "asyncmaml/Bandit-v0", "env_kwargs": {"k": int(bandit[1])}}
    family = name.partition("-v")[0]
    return {"env_id": _ENVIRONMENTS.get(family, name)}


def _set_keywords(fields: dict[str, Any], keywords: dict[str, Any]) -> None:
    """Give the environment its keywords, with the time limit where we have it."""
    if "max_episode_steps" in keywords:
        fields["max_episode_steps"] = keywords.pop("max_episode_steps")
    if "normalization_scale" in keywords:
        keywords["action_scale"] = keywords.pop("normalization_scale")
    fields["env_kwargs"] = fields.get("env_kwargs", {}) | keywords
