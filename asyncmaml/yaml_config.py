"""Configurations of tristandeleu/pytorch-maml-rl (`configs/maml/*.yaml`), in our words.

Their keys that are not ours are `env-name`, `env-kwargs`, `fast-batch-size`, `fast-lr`,
`num-steps`, `num-batches`, `meta-batch-size`, `cg-iters`, `ls-max-steps` and `ls-backtrack-ratio`;
the others differ in the hyphen alone. Ours may stand beside them, but nothing may be set twice.
"""

import re
from collections.abc import Mapping
from typing import Any

from asyncmaml.config import options
from asyncmaml.errors import ConfigurationError, MissingExtraError
from asyncmaml.option_kinds import Kind, Real, Whole

_FIELDS = {
    "fast-batch-size": "episodes_per_task",
    "meta-batch-size": "tasks_per_iteration",
    "num-batches": "iterations",
    "cg-iters": "cg_iterations",
    "ls-max-steps": "line_search_steps",
    "ls-backtrack-ratio": "line_search_ratio",
}
_NAVIGATION = "asyncmaml/Navigation2D-v0"
_ENVIRONMENTS = {
    "2DNavigation": _NAVIGATION,
    "TabularMDP": "asyncmaml/TabularMDP-v0",
    "HalfCheetahDir": "asyncmaml/HalfCheetahDir-v0",
    "HalfCheetahVel": "asyncmaml/HalfCheetahVel-v0",
    "AntDir": "asyncmaml/AntDir-v0",
    "AntVel": "asyncmaml/AntVel-v0",
    "AntPos": "asyncmaml/AntGoal-v0",
}
_KINDS = {option.name: option.kind for option in options()}
# What makes up our `step_sizes`, with what it is where it is left out.
_STEPS: dict[str, tuple[Any, Kind]] = {
    "fast-lr": (0.5, Real(0, above=True)),
    "num-steps": (1, Whole(1)),
}
_BANDIT = re.compile(r"Bandit-K(\d+)-v\d+")


def fields_of_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that a YAML file sets.

    Args:
        text: The file's.
        where: The file's name, for messages.

    Raises:
        ConfigurationError: It is no YAML or holds no mapping, sets one thing twice, or has a value
            that is not of its key's kind.
        MissingExtraError: PyYAML is not installed.
    """
    content = _read(text, where)
    fields, keywords, keywords_key = _Settings(where), _Settings(where), ""
    for key, value in content.items():
        name = str(key)
        if name in ("env-kwargs", "env_kwargs"):
            fields.set("env_kwargs", name, {} if value is None else value)
            keywords_key = name
        elif name == "env-name":
            _set_environment(fields, keywords, value)
        elif name == "nonlinearity" and isinstance(value, str):
            fields.set(name, name, value.lower())  # some of their files say "Tanh"
        elif name not in _STEPS:
            fields.set(_FIELDS.get(name, name.replace("-", "_")), name, value)
    _set_steps(fields, content)
    _set_keywords(fields, keywords, keywords_key)
    if keywords.values:
        fields.values["env_kwargs"] = keywords.values
    return fields.values


class _Settings:
    """What a file sets, each thing by one key; its messages name the key and the file."""

    def __init__(self, where: str) -> None:
        self.values: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self._where = where

    def set(self, name: str, key: str, value: Any) -> None:
        """Give `name`, which the file calls `key`, its value.

        Raises:
            ConfigurationError: Another key has done so, or the value is not of the field's kind.
        """
        if name in self._keys:
            message = (
                f"{self._where} sets {name} twice, by {self._keys[name]} and by {key}; leave one "
                "of them out"
            )
            raise ConfigurationError(message)
        self._keys[name] = key
        self.values[name] = self.checked(key, value, _KINDS[name]) if name in _KINDS else value

    def checked(self, key: str, value: Any, kind: Kind) -> Any:
        """Return the value of a key in its normal form.

        Raises:
            ConfigurationError: It is not of this kind.
        """
        return kind.check(f"{key} of {self._where}", value)


def _set_environment(fields: _Settings, keywords: _Settings, value: Any) -> None:
    """Set our environment of that name; a name that is not one of theirs is left as it is."""
    name: str = fields.checked("env-name", value, _KINDS["env_id"])
    bandit = _BANDIT.fullmatch(name)
    if bandit is None:
        fields.set("env_id", "env-name", _ENVIRONMENTS.get(name.partition("-v")[0], name))
    else:
        fields.set("env_id", "env-name", "asyncmaml/Bandit-v0")
        keywords.set("k", "env-name", int(bandit[1]))


def _set_keywords(fields: _Settings, keywords: _Settings, key: str) -> None:
    """Set each keyword that stands below `key`; theirs may hold the time limit."""
    # The action_scale of Navigation2D is no bound of the actions but a factor.
    bounds_actions = fields.values.get("env_id", _NAVIGATION) != _NAVIGATION
    for name, value in fields.values.pop("env_kwargs", {}).items():
        source = f"{name} in {key}"
        if key == "env-kwargs" and name == "max_episode_steps":
            fields.set(name, source, value)
        elif key == "env-kwargs" and name == "normalization_scale" and bounds_actions:
            keywords.set("action_scale", source, value)
        else:
            keywords.set(name, source, value)


def _set_steps(fields: _Settings, content: Mapping[Any, Any]) -> None:
    """Set the rate of each update, if the file tells their number or their one rate."""
    found = [key for key in _STEPS if key in content]
    if found:
        rate, number = (
            fields.checked(key, content.get(key, default), kind)
            for key, (default, kind) in _STEPS.items()
        )
        fields.set("step_sizes", " and ".join(found), [rate] * number)


def _read(text: str, where: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        who = f"reading {where}"
        raise MissingExtraError.naming(who, "PyYAML", "asyncmaml[cli]") from error
    try:
        content = yaml.load(text, _loader(yaml, where))
    except ConfigurationError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # of the 31st of February, the latter
        message = f"{where} holds no configuration: it is no YAML, {error}"
        raise ConfigurationError(message) from error
    if not isinstance(content, Mapping):
        message = f"{where} holds no configuration: wanted a mapping, found {content!r}"
        raise ConfigurationError(message)
    return dict(content)


def _loader(yaml: Any, where: str) -> Any:
    """Return a safe loader that takes 1e-2 for a number and refuses a key that comes twice.

    YAML 1.1, which PyYAML follows, wants 1.0e-2; and it wants keys to differ, which PyYAML does not
    look after: the last one would win.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                line = key.start_mark.line + 1
                if key.value in lines:
                    message = (
                        f"{where} sets {key.value} twice, in line {lines[key.value]} and in line "
                        f"{line}; leave one of them out"
                    )
                    raise ConfigurationError(message)
                lines[key.value] = line
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader
