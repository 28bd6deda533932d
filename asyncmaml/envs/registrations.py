"""Gymnasium's registry: ids looked up here, the user's entries carried into a worker."""

import dataclasses
import difflib
import pickle
import sys
from collections.abc import Iterable
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from asyncmaml.errors import UnknownEnvironmentError

# What every process has registered once it has imported this package.
_REGISTERED_AT_IMPORT = frozenset(gymnasium.registry)


def find_spec(env_id: str) -> EnvSpec:
    """Look an id up as `gymnasium.make` does, with its imports, warnings and hints.

    Raises:
        UnknownEnvironmentError: No environment goes by this id.
    """
    try:
        # Private, but the one place that knows "module:Id-v0", the latest version of an id
        # without one, and what to say of an old one.
        return registration._find_spec(env_id)
    except (gymnasium.error.Error, ModuleNotFoundError, ValueError) as error:
        near = difflib.get_close_matches(env_id.rpartition(":")[2], gymnasium.registry, n=3)
        hint = f" Near matches: {', '.join(near)}." if near else ""
        message = (
            f"no environment goes by the id {env_id!r}: {error}{hint} Correct the id, import "
            "the module that registers it (or pass 'module:Id-v0'), or pass a callable"
        )
        raise UnknownEnvironmentError(message) from error


def registered_by_user() -> list[bytes]:
    """Return the registry entries that a fresh worker would lack, each one pickled by itself.

    For environments that make others by id. An entry that cannot be pickled is left out: the
    worker may never need it, and the sampled environment itself does not travel this way.
    """
    import cloudpickle  # here, since a worker imports this module and need not pickle

    entries: list[bytes] = []
    for spec in list(gymnasium.registry.values()):
        if spec.id in _REGISTERED_AT_IMPORT and _is_known_everywhere(spec):
            continue
        try:
            entries.append(cloudpickle.dumps(with_objects_of_main(spec)))
        except Exception:  # pickling runs the user's code, so any error may come
            continue
    return entries


def register_all(entries: Iterable[bytes]) -> None:
    """Add what `registered_by_user` returned to this process's registry; ids already here stay.

    An entry that cannot be loaded here is left out: whoever asks for its id is told by Gymnasium.
    """
    for entry in entries:
        try:
            spec = pickle.loads(entry)
        except Exception:  # so does loading
            continue
        gymnasium.registry.setdefault(spec.id, spec)


def with_objects_of_main(spec: EnvSpec) -> EnvSpec:
    """Return a copy with "__main__:Name" replaced by the object: a worker's `__main__` lacks it."""
    main = sys.modules["__main__"]

    def resolved(entry_point: Any) -> Any:
        if isinstance(entry_point, str) and entry_point.startswith("__main__:"):
            return getattr(main, entry_point.partition(":")[2], entry_point)
        return entry_point

    return dataclasses.replace(
        spec,
        entry_point=resolved(spec.entry_point),
        vector_entry_point=resolved(spec.vector_entry_point),
    )


def _is_known_everywhere(spec: EnvSpec) -> bool:
    """Tell whether the entry point belongs to Gymnasium or to us."""
    entry_point = spec.entry_point or spec.vector_entry_point
    if isinstance(entry_point, str):
        module = entry_point.partition(":")[0]
    else:
        module = getattr(entry_point, "__module__", "")
    return f"{module}.".startswith(("gymnasium.envs.", "asyncmaml."))
