"""The kinds of values: what each accepts, what it refuses and how it says so."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import LAYER_SIZES, RATES, Flag, Kind, OrNone, Real, Whole


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_number_of_any_library_becomes_an_int(value: Any) -> None:
    found = Whole(1, 3).check("epochs", value)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize(
    "value",
    [2.9, 3.0, np.float64(3), torch.tensor(3.0), "3", True, None, [3], 0, 4, math.nan, 10**400],
    ids=repr,
)
def test_what_is_no_whole_number_of_the_range_is_told(value: Any) -> None:
    with pytest.raises(ConfigurationError) as told:
        Whole(1, 3).check("epochs", value)
    assert str(told.value) == f"epochs is {value!r}; wanted a whole number from 1 to 3"


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), Fraction(1, 2), torch.tensor(0.5)])
def test_number_of_any_library_becomes_a_float(value: Any) -> None:
    found = Real(0, 1).check("gamma", value)
    assert found == 0.5
    assert type(found) is float


@pytest.mark.parametrize(
    "value", [-0.1, 1.1, math.nan, math.inf, 10**400, "0.5", True, None, [0.5]], ids=repr
)
def test_what_is_no_number_of_the_range_is_told(value: Any) -> None:
    with pytest.raises(ConfigurationError) as told:
        Real(0, 1).check("gamma", value)
    assert str(told.value) == f"gamma is {value!r}; wanted a number between 0 and 1"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Whole(2), "a whole number of at least 2"),
        (Real(), "a finite number"),
        (Real(0), "a finite number of at least 0"),
        (Real(0, above=True), "a finite number above 0"),
        (Real(0, 1, above=True), "a number above 0 and at most 1"),
        (Flag(), "true or false"),
        (OrNone(Whole(1)), "a whole number of at least 1, or none"),
        (OrNone(Whole(1), "no limit"), "a whole number of at least 1, or none for no limit"),
    ],
)
def test_each_kind_says_its_range(kind: Kind, wanted: str) -> None:
    assert kind.wanted == wanted


@pytest.mark.parametrize("rates", [[0.1, 0.2], (0.1, 0.2), np.array([0.1, 0.2])])
def test_several_numbers_may_come_in_anything_that_has_an_order(rates: Any) -> None:
    assert RATES.check("step_sizes", rates) == (0.1, 0.2)


@pytest.mark.parametrize("sizes", ["64", b"64", {64}, {64: 1}, [[64]], [64.0]], ids=repr)
def test_what_is_no_row_of_numbers_is_refused(sizes: Any) -> None:
    with pytest.raises(ConfigurationError, match="wanted sizes of layers such as 100,100"):
        LAYER_SIZES.check("hidden_sizes", sizes)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Whole(1), "1,000", 1000),
        (Whole(1), "1_000", 1000),
        (Real(0), "1e-2", 0.01),
        (LAYER_SIZES, "64, 32", (64, 32)),
        (LAYER_SIZES, " ", ()),
        (RATES, "0.5", (0.5,)),
        (OrNone(Whole(1)), "None", None),
    ],
)
def test_text_is_read_as_what_it_stands_for(kind: Kind, text: str, value: Any) -> None:
    assert kind.read(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Whole(1), "2.9"), (LAYER_SIZES, "64,,32"), (LAYER_SIZES, "64,"), (RATES, ""), (RATES, "a")],
)
def test_text_that_stands_for_nothing_good_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        kind.read(text)
