"""The table of meta-learners: a new one is one file and one line here."""

from typing import Any

from torch import nn

from asyncmaml.errors import ConfigurationError
from asyncmaml.learning.learner import MetaLearner
from asyncmaml.learning.maml_trpo import MAMLTRPO
from asyncmaml.learning.promp import ProMP
from asyncmaml.learning.reptile import Reptile
from asyncmaml.option_kinds import Choice

LEARNERS: dict[str, type[MetaLearner]] = {
    "maml-trpo": MAMLTRPO,
    "promp": ProMP,
    "reptile": Reptile,
}


def make_learner(name: str, policy: nn.Module, **options: Any) -> MetaLearner:
    """Return the meta-learner of that name; the options are its class's own.

    Raises:
        ConfigurationError: There is no such learner or option, or an option is out of its range.
    """
    learner = LEARNERS[Choice(tuple(LEARNERS)).check("learner", name)]
    try:
        return learner(policy, **options)
    except TypeError as error:
        message = f"{name} does not take these options: {error}"
        raise ConfigurationError(message) from error
