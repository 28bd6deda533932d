"""How to make an environment: resolved once in the parent, carried out in any process.

The parent looks an id up, warns and complains; what a worker gets is complete, and needs neither
the user's registrations nor the user's modules to have been imported before.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.wrappers import TimeLimit

from asyncmaml.envs.extras import mujoco_required
from asyncmaml.envs.mujoco_log import quiet_mujoco
from asyncmaml.envs.registrations import (
    find_spec,
    register_all,
    registered_by_user,
    with_objects_of_main,
)
from asyncmaml.envs.rows import RowVectorEnv, steps_by_row
from asyncmaml.errors import ConfigurationError, UnknownEnvironmentError
from asyncmaml.option_kinds import OrNone, Whole

__all__ = ["EnvMaker", "quiet_mujoco", "register_all", "registered_by_user"]

AnyEnv = gymnasium.Env[Any, Any]
_TIME_LIMIT = OrNone(Whole(1), "the environment's own time limit")


@dataclass(frozen=True)
class EnvMaker:
    """How to make one environment; made by `resolve`, travels by cloudpickle.

    Attributes:
        source: A complete spec (keywords, time limit, no checker, no order enforcement: the
            worker keeps the order itself, which saves 0.4 us a step), or a callable.
        env_kwargs: Passed to the callable; a spec has them inside.
        max_episode_steps: Time limit put around what the callable makes; a spec has it inside.
        vectorized: False: `make_rows` always returns None.
    """

    source: EnvSpec | Callable[..., AnyEnv]
    env_kwargs: dict[str, Any]
    max_episode_steps: int | None = None
    vectorized: bool = True

    @classmethod
    def resolve(
        cls,
        env: str | EnvSpec | Callable[..., AnyEnv],
        env_kwargs: Mapping[str, Any] | None = None,
        max_episode_steps: int | None = None,
        *,
        vectorized: bool = True,
    ) -> Self:
        """Find out what `env` is; makes nothing yet.

        Args:
            env: A Gymnasium id, also as "module:Id-v0" (the module is imported first), a spec, or
                a callable that returns an environment.
            env_kwargs: For the environment; they go before the spec's own.
            max_episode_steps: Replaces the spec's time limit. A callable's environment gets it on
                top of any limit of its own, so that the shorter one ends the episode.
            vectorized: False: never use the natively vectorised form.

        Raises:
            UnknownEnvironmentError: No environment goes by this id, or `env` is of another kind.
            ConfigurationError: `env_kwargs` or `max_episode_steps` is out of its range.
        """
        kwargs = _checked_kwargs(env_kwargs)
        limit = _TIME_LIMIT.check("max_episode_steps", max_episode_steps)
        if isinstance(env, str):
            env = find_spec(env)
        if isinstance(env, EnvSpec):
            spec = with_objects_of_main(env)
            spec = dataclasses.replace(
                spec,
                kwargs=copy.deepcopy(spec.kwargs) | kwargs,
                max_episode_steps=spec.max_episode_steps if limit is None else limit,
                order_enforce=False,
                disable_env_checker=True,
            )
            return cls(spec, {}, None, vectorized)
        if callable(env):
            return cls(env, kwargs, limit, vectorized)
        message = (
            f"an environment cannot be made from {env!r} of type {type(env).__name__}; pass a "
            "Gymnasium id, an EnvSpec, or a callable that returns an environment"
        )
        raise UnknownEnvironmentError(message)

    @property
    def name(self) -> str:
        """The id, or the callable's name: for messages."""
        if isinstance(self.source, EnvSpec):
            return self.source.id
        return getattr(self.source, "__qualname__", None) or repr(self.source)

    def make(self) -> AnyEnv:
        """Make one environment.

        Raises:
            ConfigurationError: The callable returned something else.
            MissingExtraError: It needs MuJoCo, which is not installed.
        """
        with quiet_mujoco(), mujoco_required(self.name):
            if isinstance(self.source, EnvSpec):
                return gymnasium.make(self.source)
            env = self.source(**self.env_kwargs)
        if not isinstance(env, gymnasium.Env):
            message = (
                f"{self.name} returned {env!r} of type {type(env).__module__}."
                f"{type(env).__qualname__} where a gymnasium.Env was wanted; return the "
                "environment, or convert an old gym environment with shimmy"
            )
            raise ConfigurationError(message)
        if self.max_episode_steps is not None:
            env = TimeLimit(env, self.max_episode_steps)
        return env

    @property
    def has_rows(self) -> bool:
        """Whether there is a natively vectorised form that `make_rows` would make."""
        return self._row_creator() is not None

    def make_rows(self, num_rows: int) -> RowVectorEnv | None:
        """Make `num_rows` environments as one natively vectorised one.

        None where there is no such form, or its rows are not independent (see `rows.py`), or
        the spec puts wrappers around the single form, which the other one would lack.
        """
        with quiet_mujoco():
            creator = self._row_creator()
            if creator is None:
                return None
            assert isinstance(self.source, EnvSpec)
            env = creator(
                num_envs=num_rows,
                max_episode_steps=self.source.max_episode_steps,
                **copy.deepcopy(self.source.kwargs),
            )
        return cast(RowVectorEnv, env)

    def _row_creator(self) -> Callable[..., object] | None:
        spec = self.source
        if not (
            self.vectorized
            and isinstance(spec, EnvSpec)
            and spec.vector_entry_point is not None
            and not spec.additional_wrappers
        ):
            return None
        creator: object = spec.vector_entry_point
        if isinstance(creator, str):
            creator = load_env_creator(creator)
        return cast(Callable[..., object], creator) if steps_by_row(creator) else None


def _checked_kwargs(env_kwargs: object) -> dict[str, Any]:
    if env_kwargs is None:
        return {}
    if isinstance(env_kwargs, Mapping) and all(isinstance(key, str) for key in env_kwargs):
        return dict(env_kwargs)
    message = (
        f"env_kwargs is {env_kwargs!r}; pass a dict of the environment's keywords, such as "
        "{'render_mode': 'rgb_array'}, or None"
    )
    raise ConfigurationError(message)
