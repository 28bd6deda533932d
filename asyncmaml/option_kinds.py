"""The kinds of values that an argument, a flag or a field of a configuration may have.

A kind checks a value that code hands in and reads one that a command line or a file writes as
text; the two accept the same. Every place checks its numbers by these: below all but `errors`,
and plain Python, since workers and the command line's help come through here.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

from asyncmaml.errors import ConfigurationError


class Kind(ABC):
    """What values are good; `wanted` says it to a person."""

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
        """Return the value of what is called `name` in its normal form.

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
    """A whole number from `minimum` on, up to `maximum` if there is one."""

    minimum: int
    maximum: int | None = None
    metavar = "N"

    @property
    def wanted(self) -> str:  # type: ignore[override]
        """Its range, in a sentence."""
        if self.maximum is None:
            return f"a whole number of at least {self.minimum}"
        return f"a whole number from {self.minimum} to {self.maximum}"

    def accept(self, value: Any) -> int:
        """See `Kind`; a float is refused even where it is whole, and numpy's integers are not."""
        is_int = type(value) is int  # the other tests cost ten times as much
        if not is_int and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
            raise TypeError
        number = int(value.__index__())
        if number < self.minimum or (self.maximum is not None and number > self.maximum):
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
        if math.isinf(self.low):
            return "a finite number"
        if math.isinf(self.high):
            return f"a finite number {'above' if self.above else 'of at least'} {self.low:g}"
        if self.above:
            return f"a number above {self.low:g} and at most {self.high:g}"
        return f"a number between {self.low:g} and {self.high:g}"

    def accept(self, value: Any) -> float:
        """See `Kind`."""
        is_float = type(value) is float  # the other tests cost ten times as much
        if not is_float and (isinstance(value, bool | str) or not isinstance(value, SupportsFloat)):
            raise TypeError
        try:
            number = float(value)
        except OverflowError:
            raise ValueError from None
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
        if isinstance(value, str | bytes | Mapping | Set):
            raise TypeError
        values = tuple(value) if isinstance(value, Iterable) else (value,)
        if not values and not self.may_be_empty:
            raise ValueError
        return tuple(self.one.accept(item) for item in values)

    def read(self, text: str) -> tuple[Any, ...]:
        """See `Kind`."""
        items = text.split(",") if text.strip() else []
        return self.accept([self.one.read(item.strip()) for item in items])


@dataclass(frozen=True)
class OrNone(Kind):
    """A value of one kind, or None, written "none"."""

    one: Kind
    none_stands_for: str = ""
    """Told where None means something that one would not guess."""

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """That of the value."""
        return self.one.metavar

    @property
    def wanted(self) -> str:  # type: ignore[override]
        """The value's, or none."""
        meaning = f" for {self.none_stands_for}" if self.none_stands_for else ""
        return f"{self.one.wanted}, or none{meaning}"

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


LAYER_SIZES = Many(Whole(1), "SIZES", "sizes of layers such as 100,100", may_be_empty=True)
RATES = Many(Real(0, above=True), "RATES", "one number above 0 for each update, such as 0.1,0.05")
