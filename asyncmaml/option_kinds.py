"""The kinds of values that an option of a configuration may have.

A kind checks a value that code hands in and reads one that a command line or a file writes as
text; the two accept the same. Plain Python: the command line's help comes through here.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

from asyncmaml.errors import ConfigurationError


class Kind(ABC):
    """What an option's values are; `wanted` says it to a person."""

    metavar: str
    wanted: str

    @abstractmethod
    def accept(self, value: Any) -> Any:
        """Return the value in its normal form.

        Raises:
            ValueError, TypeError: It is not of this kind.
        """

    def read(self, text: str) -> Any:
        """Return the value that a text stands for; its errors are those of `accept`."""
        return self.accept(text)

    def check(self, name: str, value: Any) -> Any:
        """Return the value of the option `name` in its normal form.

        Raises:
            ConfigurationError: It is not of this kind.
        """
        try:
            return self.accept(value)
        except (TypeError, ValueError):
            message = f"{name} is {value!r}; wanted {self.wanted}"
            raise ConfigurationError(message) from None


@dataclass(frozen=True)
class Text(Kind):
    """Any text but the empty one."""

    metavar: str
    wanted: str

    def accept(self, value: Any) -> str:
        """See `Kind`."""
        if not isinstance(value, str) or not value:
            raise TypeError
        return value


@dataclass(frozen=True)
class Choice(Kind):
    """One of some names."""

    names: tuple[str, ...]

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """The names."""
        return "{" + ",".join(self.names) + "}"

    @property
    def wanted(self) -> str:  # type: ignore[override]
        """The names, in a sentence."""
        return "one of " + ", ".join(self.names)

    def accept(self, value: Any) -> str:
        """See `Kind`."""
        if value not in self.names:
            raise ValueError
        return str(value)


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    metavar = "BOOL"
    wanted = "true or false"

    def accept(self, value: Any) -> bool:
        """See `Kind`."""
        if not isinstance(value, bool):
            raise TypeError
        return value


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from `minimum` on."""

    minimum: int
    metavar = "N"

    @property
    def wanted(self) -> str:  # type: ignore[override]
        """Its range, in a sentence."""
        return f"a whole number of at least {self.minimum}"

    def accept(self, value: Any) -> int:
        """See `Kind`."""
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError
        number = value.__index__()
        if number < self.minimum:
            raise ValueError
        return number

    def read(self, text: str) -> int:
        """See `Kind`; 1,000 and 1_000 are read as well."""
        return self.accept(int(text.replace(",", "")))


@dataclass(frozen=True)
class Real(Kind):
    """A finite number from `low` to `high`, the ends included unless `above` says otherwise."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    """Whether `low` itself is left out."""
    metavar = "X"

    @property
    def wanted(self) -> str:  # type: ignore[override]
        """Its range, in a sentence."""
        start = f"a number {'above' if self.above else 'of at least'} {self.low:g}"
        return start if math.isinf(self.high) else f"{start} and at most {self.high:g}"

    def accept(self, value: Any) -> float:
        """See `Kind`."""
        if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
            raise TypeError
        number = float(value)
        if not (math.isfinite(number) and self.low <= number <= self.high):
            raise ValueError
        if self.above and number == self.low:
            raise ValueError
        return number

    def read(self, text: str) -> float:
        """See `Kind`."""
        return self.accept(float(text))


@dataclass(frozen=True)
class Many(Kind):
    """Some values of one kind, written with commas between them."""

    one: Kind
    metavar: str
    wanted: str
    may_be_empty: bool = False

    def accept(self, value: Any) -> tuple[Any, ...]:
        """See `Kind`; one value alone stands for itself."""
        if isinstance(value, str | Mapping):
            raise TypeError
        values = tuple(value) if isinstance(value, Sequence) else (value,)
        if not values and not self.may_be_empty:
            raise ValueError
        return tuple(self.one.accept(item) for item in values)

    def read(self, text: str) -> tuple[Any, ...]:
        """See `Kind`."""
        items = [item for item in text.split(",") if item.strip()]
        return self.accept([self.one.read(item.strip()) for item in items])


@dataclass(frozen=True)
class OrNone(Kind):
    """A value of one kind, or None, written "none"."""

    one: Kind

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """That of the value."""
        return self.one.metavar

    @property
    def wanted(self) -> str:  # type: ignore[override]
        """The value's, or none."""
        return f"{self.one.wanted}, or none"

    def accept(self, value: Any) -> Any:
        """See `Kind`."""
        return None if value is None else self.one.accept(value)

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return None if text.lower() == "none" else self.one.read(text)


@dataclass(frozen=True)
class Keywords(Kind):
    """Keywords of a call, with values that JSON can hold."""

    metavar = "KEY=VALUE"
    wanted = "a mapping of keywords to values that JSON can hold"

    def accept(self, value: Any) -> dict[str, Any]:
        """See `Kind`."""
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError
        copy: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
        return copy
