"""`TrainConfig`: what it accepts, what it says of the rest, and its files."""

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncmaml import TrainConfig, config
from asyncmaml.config import options
from asyncmaml.errors import ConfigurationError, MissingExtraError
from asyncmaml.learning.learners import LEARNERS
from asyncmaml.learning.mlp import NONLINEARITIES
from asyncmaml.learning.objectives import OBJECTIVES
from asyncmaml.option_kinds import Choice, Flag, Keywords, Kind, Many, OrNone, Real, Text, Whole
from asyncmaml.presets import PRESETS

# pytorch-maml-rl's configs/maml/halfcheetah-vel.yaml, key by key.
CHEETAH = """\
env-name: HalfCheetahVel-v2
env-kwargs:
    low: 0.0
    high: 2.0
    normalization_scale: 10.0
    max_episode_steps: 100
gamma: 0.99
gae-lambda: 1.0
first-order: false
hidden-sizes:
    - 64
    - 64
nonlinearity: tanh
fast-batch-size: 20
num-steps: 1
fast-lr: 0.1
num-batches: 500
meta-batch-size: 40
max-kl: 1.0e-2
cg-iters: 10
cg-damping: 1.0e-5
ls-max-steps: 15
ls-backtrack-ratio: 0.8
"""


def of_yaml(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    return TrainConfig.load(path)


# ---- fields ----


def test_names_are_those_of_the_tables_that_they_choose_from() -> None:
    assert set(config.NONLINEARITIES) == NONLINEARITIES.keys()
    assert set(config.OBJECTIVES) == OBJECTIVES.keys()
    assert set(config.LEARNERS) == LEARNERS.keys()


def test_every_field_has_a_kind_a_group_and_a_text() -> None:
    for option in options():
        assert option.help
        assert option.kind.metavar
        assert option.kind.wanted
        assert option.group in ("run", "environment", "policy", "learner", *config.LEARNERS)


@pytest.mark.parametrize("option", list(options()), ids=lambda option: option.name)
def test_every_default_is_of_its_kind(option: config.Option) -> None:
    assert option.kind.check(option.name, option.default) == option.default


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("env_id", "", "a Gymnasium id"),
        ("env_id", 3, "a Gymnasium id"),
        ("env_kwargs", {"a": object()}, "that JSON can hold"),
        ("env_kwargs", {"a": math.nan}, "that JSON can hold"),
        ("env_kwargs", [1], "a mapping of keywords"),
        ("env_kwargs", {1: 2}, "a mapping of keywords"),
        ("max_episode_steps", 0, "a whole number of at least 1, or none"),
        ("gamma", 1.1, "a number between 0 and 1"),
        ("gamma", math.nan, "a number between 0 and 1"),
        ("gamma", "0.9", "a number between 0 and 1"),
        ("hidden_sizes", (64, 0), "sizes of layers"),
        ("hidden_sizes", "64", "sizes of layers"),
        ("step_sizes", (), "one number above 0 for each update"),
        ("step_sizes", (0.1, 0.0), "one number above 0 for each update"),
        ("step_sizes", (math.inf,), "one number above 0 for each update"),
        ("nonlinearity", "swish", "one of relu, tanh"),
        ("learner", "maml", "one of maml-trpo, promp, reptile"),
        ("first_order", 1, "true or false"),
        ("iterations", 2.5, "a whole number of at least 1"),
        ("iterations", True, "a whole number of at least 1"),
        ("seed", -1, "a whole number of at least 0"),
        ("on_task_error", "ignore", "one of raise, skip"),
        ("max_pre_kl", 0, "a finite number above 0, or none"),
    ],
)
def test_value_out_of_range_is_told_with_what_was_wanted(
    field: str, value: Any, wanted: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field} is .*; wanted .*{wanted}"):
        TrainConfig(**{field: value})


def test_numbers_come_into_their_normal_form() -> None:
    made = TrainConfig(step_sizes=[1, 2], gamma=1, hidden_sizes=8)  # type: ignore[arg-type]
    assert made.step_sizes == (1.0, 2.0)
    assert (made.gamma, made.hidden_sizes, made.num_updates) == (1.0, (8,), 2)
    assert isinstance(made.gamma, float)


def test_configuration_cannot_be_changed_from_outside() -> None:
    keywords = {"goal": [1, 2]}
    made = TrainConfig(env_kwargs=keywords)
    keywords["goal"].append(3)
    assert made.env_kwargs == {"goal": [1, 2]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.gamma = 0.5  # type: ignore[misc]


def test_option_of_another_learner_is_refused_and_not_passed_over() -> None:
    with pytest.raises(ConfigurationError, match=r"max_kl is 0\.02, which the learner promp does"):
        TrainConfig(learner="promp", max_kl=0.02)
    assert TrainConfig(learner="promp", clip=0.2, first_order=True).clip == 0.2
    with pytest.raises(ConfigurationError, match="train with maml-trpo or promp"):
        TrainConfig(learner="reptile", first_order=True)


def test_replace_checks_what_it_is_given() -> None:
    made = TrainConfig()
    assert made.replace(gamma=0.5).gamma == 0.5
    assert made.gamma == 0.99
    with pytest.raises(ConfigurationError, match=r"'gama', .* \(did you mean 'gamma'\?\)"):
        made.replace(gama=0.5)


def test_another_learner_leaves_the_options_of_the_old_one_behind() -> None:
    made = TrainConfig(max_kl=0.02, max_pre_kl=0.1, first_order=True, gae_lambda=0.9)
    promp = made.replace(learner="promp", clip=0.2)
    assert (promp.max_kl, promp.max_pre_kl, promp.clip) == (0.01, None, 0.2)
    assert (promp.first_order, promp.gae_lambda) == (True, 0.9)
    assert not promp.replace(learner="reptile").first_order
    with pytest.raises(ConfigurationError, match=r"max_kl is 0\.05"):
        made.replace(learner="promp", max_kl=0.05)


# ---- presets ----


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_configuration(name: str) -> None:
    made = TrainConfig.preset(name)
    assert made.env_id.startswith("asyncmaml/")
    assert PRESETS[name].about


def test_navigation_is_set_up_as_in_the_paper() -> None:
    made = TrainConfig.preset("navigation-2d")
    assert made.env_kwargs == {"low": -0.5, "high": 0.5, "action_scale": 0.1}
    assert (made.hidden_sizes, made.nonlinearity, made.init_std) == ((100, 100), "relu", 1.0)
    assert (made.gamma, made.gae_lambda, made.step_sizes) == (0.99, 1.0, (0.5,))
    assert (made.tasks_per_iteration, made.episodes_per_task) == (20, 20)
    assert (made.max_episode_steps, made.max_kl, made.objective) == (100, 0.01, None)
    assert made.max_pre_kl is not None  # the one addition: a guard


def test_preset_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigurationError, match=r"'navigation' \(did you .*'navigation-2d'"):
        TrainConfig.preset("navigation")


# ---- files ----


@pytest.mark.parametrize("name", PRESETS)
def test_file_gives_back_the_configuration(name: str, tmp_path: Path) -> None:
    made = TrainConfig.preset(name).replace(seed=3, max_episode_steps=None)
    made.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == made


def test_file_may_leave_fields_out() -> None:
    assert TrainConfig.from_json('{"gamma": 0.5}') == TrainConfig(gamma=0.5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gamma: 1", "it is no JSON"),
        ("[1]", r"wanted a mapping, found \[1\]"),
        ('{"gama": 1}', "has 'gama', which is no field"),
        ('{"gamma": 2}', "gamma of .* is 2; wanted a number between 0 and 1"),
        ('{"epochs": 2.9}', "epochs of .* is 2.9; wanted a whole number"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "it is no text, 'utf-8' codec"),
    ],
)
def test_file_that_holds_something_else_is_named(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=reason) as told:
        TrainConfig.load(path)
    assert str(path) in str(told.value)


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
def test_file_that_is_no_text_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(ConfigurationError, match=f"{name} holds no configuration: it is no text"):
        TrainConfig.load(tmp_path / name)


# ---- configurations of pytorch-maml-rl ----


def test_yaml_of_pytorch_maml_rl_is_our_preset(tmp_path: Path) -> None:
    made = of_yaml(tmp_path, CHEETAH)
    wanted = TrainConfig.preset("halfcheetah-vel")
    assert {**made.env_kwargs} == {**wanted.env_kwargs}
    assert made == wanted


@pytest.mark.parametrize(
    ("preset", "name", "bounds"),
    [
        ("halfcheetah-dir", "HalfCheetahDir-v2", ""),
        ("ant-dir", "AntDir-v2", ""),
        ("ant-vel", "AntVel-v2", "    low: 0.0\n    high: 3.0\n"),
        ("ant-goal", "AntPos-v1", "    low: -3.0\n    high: 3.0\n"),
    ],
)
def test_yaml_of_each_of_their_locomotion_families_is_our_preset(
    preset: str, name: str, bounds: str, tmp_path: Path
) -> None:
    text = CHEETAH.replace("    low: 0.0\n    high: 2.0\n", bounds)
    made = of_yaml(tmp_path, text.replace("HalfCheetahVel-v2", name))
    wanted = TrainConfig.preset(preset)
    assert {**made.env_kwargs} == {**wanted.env_kwargs}
    assert made == wanted


def test_yaml_of_their_navigation_has_their_policy_and_rate(tmp_path: Path) -> None:
    """Its actions are not scaled, and its nonlinearity was once written with a capital."""
    text = CHEETAH.replace("HalfCheetahVel-v2", "2DNavigation-v0").replace("tanh", '"Tanh"')
    text = text.replace("low: 0.0", "low: -0.5").replace("high: 2.0", "high: 0.5")
    text = text.replace("    normalization_scale: 10.0\n    max_episode_steps: 100\n", "")
    made = of_yaml(tmp_path, text.replace("meta-batch-size: 40", "meta-batch-size: 20"))
    assert made == TrainConfig(
        env_id="asyncmaml/Navigation2D-v0",
        env_kwargs={"low": -0.5, "high": 0.5},
        hidden_sizes=(64, 64),
        nonlinearity="tanh",
    )


@pytest.mark.parametrize("num_episodes", [10, 100, 500])
@pytest.mark.parametrize("num_arms", [5, 10, 50])
def test_yaml_of_their_bandits_has_no_keywords(
    num_arms: int, num_episodes: int, tmp_path: Path
) -> None:
    head = f"env-name: Bandit-K{num_arms}-v0\ngamma: 0.95\n"
    text = head + CHEETAH[CHEETAH.index("gae-lambda") :]
    for old, new in (
        ("    - 64\n", "    - 32\n"),
        ("tanh", "relu"),
        ("fast-batch-size: 20", f"fast-batch-size: {num_episodes}"),
        ("fast-lr: 0.1", "fast-lr: 0.5"),
        ("meta-batch-size: 40", "meta-batch-size: 20"),
    ):
        text = text.replace(old, new)
    assert of_yaml(tmp_path, text) == TrainConfig(
        env_id="asyncmaml/Bandit-v0",
        env_kwargs={"k": num_arms},
        gamma=0.95,
        hidden_sizes=(32, 32),
        step_sizes=(0.5,),
        episodes_per_task=num_episodes,
    )


@pytest.mark.parametrize(
    ("name", "env_id", "keywords"),
    [
        ("2DNavigation-v0", "asyncmaml/Navigation2D-v0", {}),
        ("Bandit-K10-v0", "asyncmaml/Bandit-v0", {"k": 10}),
        ("TabularMDP-v0", "asyncmaml/TabularMDP-v0", {}),
        ("HalfCheetahDir-v2", "asyncmaml/HalfCheetahDir-v0", {}),
        ("HalfCheetahVel-v1", "asyncmaml/HalfCheetahVel-v0", {}),
        ("AntDir-v2", "asyncmaml/AntDir-v0", {}),
        ("AntVel-v2", "asyncmaml/AntVel-v0", {}),
        ("AntPos-v1", "asyncmaml/AntGoal-v0", {}),
        ("Pendulum-v1", "Pendulum-v1", {}),
    ],
)
def test_their_environments_are_ours(
    name: str, env_id: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    made = of_yaml(tmp_path, f"env-name: {name}\n")
    assert (made.env_id, made.env_kwargs) == (env_id, keywords)


def test_their_steps_become_a_rate_for_each_update(tmp_path: Path) -> None:
    assert of_yaml(tmp_path, "fast-lr: 0.5\nnum-steps: 3\n").step_sizes == (0.5, 0.5, 0.5)
    assert of_yaml(tmp_path, "num-steps: 2\n").step_sizes == (0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gamma: 0.9\nseed: 1\ngamma: 0.5", "gamma twice, in line 1 and in line 3"),
        ("env-kwargs:\n  k: 1\n  k: 2", "k twice, in line 2 and in line 3"),
        ("gae-lambda: 0.9\ngae_lambda: 0.5", "gae_lambda twice, by gae-lambda and by gae_lambda"),
        (
            "fast-batch-size: 3\nepisodes-per-task: 4",
            "episodes_per_task twice, by fast-batch-size and by episodes-per-task",
        ),
        ("env_id: A-v0\nenv-name: B-v0", "env_id twice, by env_id and by env-name"),
        ("env-kwargs: {low: 0}\nenv_kwargs: {high: 1}", "by env-kwargs and by env_kwargs"),
        (
            "max-episode-steps: 9\nenv-kwargs: {max_episode_steps: 10}",
            "by max-episode-steps and by max_episode_steps in env-kwargs",
        ),
        (
            "env-kwargs: {action_scale: 1, normalization_scale: 10}\nenv-name: AntDir-v2",
            "action_scale twice, by action_scale in env-kwargs and by normalization_scale in",
        ),
        ("env-name: Bandit-K5-v0\nenv-kwargs: {k: 7}", "k twice, by env-name and by k in env-kw"),
        ("fast-lr: 0.5\nstep-sizes: [0.1]", "by step-sizes and by fast-lr;"),
        ("step_sizes: 0.1\nnum-steps: 2\nfast-lr: 1", "by step_sizes and by fast-lr and num-st"),
    ],
)
def test_nothing_may_be_set_twice(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"theirs.yaml sets .*{reason}") as told:
        of_yaml(tmp_path, text)
    assert str(told.value).endswith("; leave one of them out")


# What is none of each kind; null besides, unless a kind takes it.
NOT_A: dict[type[Kind], list[str]] = {
    Text: ["3", "yes", "[Ant-v5]", "{a: Ant-v5}", "''"],
    Choice: ["3", "yes", "[tanh]", "{a: tanh}", "many"],
    Flag: ["1", "many", "[true]", "{a: true}"],
    Whole: ["1.9", "2.0", "yes", "many", "'3'", "[3]", "{a: 3}", "2020-02-03"],
    Real: ["many", "'0.5'", "yes", "[0.5]", "{a: 0.5}", ".nan", ".inf", "2020-02-03"],
    Many: ["many", "{a: 1}", "[many]", "[[0.5]]", "[yes]", "!!set {1, 2}", "[-1]"],
    Keywords: ["3", "many", "[1]", "{1: 2}", "{a: .nan}", "{a: 2020-02-03}"],
}
THEIR_KINDS: dict[str, Kind] = {
    **{option.name.replace("_", "-"): option.kind for option in options()},
    "env-name": Text("", ""),
    "fast-batch-size": Whole(1),
    "meta-batch-size": Whole(1),
    "num-batches": Whole(1),
    "num-steps": Whole(1),
    "cg-iters": Whole(1),
    "ls-max-steps": Whole(1),
    "fast-lr": Real(0),
    "ls-backtrack-ratio": Real(0),
}


def wrong_values() -> Iterator[tuple[str, str]]:
    for key, kind in THEIR_KINDS.items():
        for value in NOT_A[type(kind.one if isinstance(kind, OrNone) else kind)]:
            yield key, value
        if not isinstance(kind, OrNone | Keywords):
            yield key, "null"


@pytest.mark.parametrize(("key", "value"), list(wrong_values()))
def test_value_of_another_type_is_told_with_its_key_and_file(
    key: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{key} of .*theirs.yaml is .*; wanted "):
        of_yaml(tmp_path, f"{key}: {value}")


def test_time_limit_of_another_type_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^max_episode_steps in env-kwargs of .* is 1.5; wanted a whole"
    ):
        of_yaml(tmp_path, "env-kwargs: {max_episode_steps: 1.5}")


def test_empty_keywords_are_none(tmp_path: Path) -> None:
    assert of_yaml(tmp_path, "env-kwargs:\n").env_kwargs == {}


@pytest.mark.parametrize(
    ("name", "keyword"),
    [("AntPos-v1", "action_scale"), ("2DNavigation-v0", "normalization_scale")],
)
def test_their_bound_of_actions_does_not_become_the_factor_of_the_navigation(
    name: str, keyword: str, tmp_path: Path
) -> None:
    made = of_yaml(tmp_path, f"env-kwargs: {{normalization_scale: 10}}\nenv-name: {name}\n")
    assert made.env_kwargs == {keyword: 10}


def test_keywords_of_ours_are_not_theirs(tmp_path: Path) -> None:
    made = of_yaml(tmp_path, "env-name: Bandit-K3-v0\nenv_kwargs: {max_episode_steps: 7}\n")
    assert (made.env_kwargs, made.max_episode_steps) == ({"k": 3, "max_episode_steps": 7}, None)


def test_exponent_without_a_point_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 would read the text "1e-2"."""
    made = of_yaml(tmp_path, "max-kl: 1e-2\ncg-damping: 1E-5\n")
    assert (made.max_kl, made.cg_damping) == (0.01, 1e-5)


def test_our_fields_may_stand_in_their_file(tmp_path: Path) -> None:
    made = of_yaml(tmp_path, "seed: 4\nlearner: promp\nlearning-rate: 0.01\n")
    assert (made.seed, made.learner, made.learning_rate) == (4, "promp", 0.01)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "it is no YAML"),
        ("- 1", "wanted a mapping"),
        ("seed: 2020-02-31", "it is no YAML, day is out of range"),
        ("fast-batch-sice: 3", "has 'fast_batch_sice', which is no field"),
        ("!!python/object/apply:os.getcwd []", "it is no YAML"),
    ],
)
def test_yaml_that_is_no_configuration_is_named(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"theirs.yaml .*{reason}"):
        of_yaml(tmp_path, text)


def test_missing_pyyaml_is_told_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"theirs.yaml needs PyYAML, .*'asyncmaml\[cli\]'"):
        of_yaml(tmp_path, "seed: 1")
