"""Conjugate gradients against dense solutions, and tasks in groups.

Fault 11 of the list in MAMLRL.md 3.3 fails here when put back: 0 / 0 at a gradient of 0, and no
look at the curvature.
"""

import math
import re
from collections.abc import Sequence

import pytest
import torch
from learning_cases import draw_tasks, make_policy
from torch import Tensor

from asyncmaml.learning.conjugate_gradient import conjugate_gradient
from asyncmaml.learning.groups import group_tasks


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def random_symmetric(eigenvalues: Sequence[float]) -> Tensor:
    basis = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64))[0]
    diagonal = torch.diag(torch.tensor(eigenvalues, dtype=torch.float64))
    product: Tensor = basis @ diagonal @ basis.T
    return product


def test_conjugate_gradients_solve_a_damped_system_in_as_many_steps_as_eigenvalues() -> None:
    matrix = random_symmetric([1.0, 2.0, 2.0, 5.0])
    right = torch.randn(4, dtype=torch.float64)
    solution = conjugate_gradient(lambda v: matrix @ v, right, iterations=3, damping=0.5)
    damped = matrix + 0.5 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(solution.x, torch.linalg.solve(damped, right))
    torch.testing.assert_close(solution.product, damped @ solution.x)
    assert solution.reason == ""


def test_conjugate_gradients_without_a_right_side_ask_for_nothing() -> None:
    """Fault 11: 0 / 0."""
    solution = conjugate_gradient(lambda v: pytest.fail("asked"), torch.zeros(3), iterations=5)
    assert torch.equal(solution.x, torch.zeros(3))


def test_ten_iterations_in_float32_are_those_in_float64() -> None:
    """Badly conditioned, as a policy's curvature is; by the last direction alone it is off by 1."""
    matrix = random_symmetric([10.0 ** (-i / 5) for i in range(30)])
    right = torch.randn(30, dtype=torch.float64)
    small = matrix.float()
    one = conjugate_gradient(lambda v: matrix @ v, right, iterations=15, residual_tolerance=0)
    other = conjugate_gradient(
        lambda v: small @ v, right.float(), iterations=15, residual_tolerance=0
    )
    assert float((other.x - one.x).norm() / one.x.norm()) < 1e-4


@pytest.mark.parametrize("tiny", [1e-3, 1e-12])
def test_a_small_right_side_is_solved_as_well_as_a_large_one(tiny: float) -> None:
    matrix = random_symmetric([1.0, 10.0, 100.0])
    right = torch.randn(3, dtype=torch.float64)
    one, other = (
        conjugate_gradient(lambda v: matrix @ v, scale * right, iterations=5) for scale in (1, tiny)
    )
    torch.testing.assert_close(other.x / tiny, one.x)


@pytest.mark.parametrize("curvature", [-3.0, 0.0, math.nan, math.inf])
def test_conjugate_gradients_make_no_step_along_a_curvature_that_is_not_positive(
    curvature: float,
) -> None:
    """Fault 11."""
    solution = conjugate_gradient(lambda v: curvature * v, torch.ones(3), iterations=5)
    assert torch.equal(solution.x, torch.zeros(3))
    assert re.match(r"the curvature along direction 0 is .*, not above 0", solution.reason)


def test_conjugate_gradients_keep_what_they_found_before_the_curvature_turned() -> None:
    """Fault 11: one step along (1, 1, 0.1), by 2.01 / 2.7; the next direction curves down."""
    matrix = torch.diag(torch.tensor([1.0, 2.0, -30.0], dtype=torch.float64))
    right = torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64)
    solution = conjugate_gradient(lambda v: matrix @ v, right, iterations=10)
    torch.testing.assert_close(solution.x, right * 2.01 / 2.7)
    assert "along direction 1" in solution.reason


def test_tasks_with_few_rows_are_stacked_and_others_stay_alone_in_order() -> None:
    policy = make_policy("normal")
    lengths = {0: [2, 1], 1: [3], 2: [9] * 9, 3: [1], 4: [2, 2]}
    tasks = draw_tasks(policy, (0.1,), num_tasks=5, lengths=lambda task: lengths[task])
    groups = group_tasks(tasks, stack_below_rows=81)
    assert [(group.num_tasks, group.is_stacked) for group in groups] == [
        (2, True),
        (1, False),
        (2, True),
    ]
    assert groups[0].phases[0].mask.shape == (2, 3, 2)
    assert groups[0].mean_returns.tolist() == pytest.approx(
        [phases[-1].mean_return for phases in tasks[:2]]
    )
    assert [group.num_tasks for group in group_tasks(tasks, stack_below_rows=0)] == [1] * 5
