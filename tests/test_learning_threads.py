"""Tasks computed by several threads at once: nothing of that may show in a result."""

import threading
from collections.abc import Iterator

import pytest
import torch
from learning_cases import draw_tasks, make_policy, own_params
from processes import PATIENCE
from torch import Tensor
from torch.distributions import Distribution

from asyncmaml.learning.learners import LEARNERS, make_learner
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.policies import NormalMLPPolicy
from asyncmaml.learning.task_threads import at_once

RATES = (0.3, 0.2)


@pytest.fixture(autouse=True)
def threads_are_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items() -> None:
    torch.set_num_threads(3)
    assert at_once(lambda item: item * item, range(100)) == [item * item for item in range(100)]


@pytest.mark.parametrize("num_threads", [2, 3])
def test_as_many_run_at_once_as_torch_has_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    all_at_once = threading.Barrier(num_threads)
    at_once(lambda _: all_at_once.wait(PATIENCE), range(num_threads))


@pytest.mark.parametrize(
    ("num_threads", "num_items", "wanted"), [(1, 3, 1), (2, 3, 1), (4, 2, 2), (3, 2, 1), (2, 1, 2)]
)
def test_torchs_threads_are_shared_out_and_the_callers_stay(
    num_threads: int, num_items: int, wanted: int
) -> None:
    torch.set_num_threads(num_threads)
    found = at_once(lambda _: torch.get_num_threads(), range(num_items))
    assert found == [wanted] * num_items
    assert torch.get_num_threads() == num_threads


def test_error_of_the_first_item_that_has_one_is_raised_and_no_thread_stays() -> None:
    torch.set_num_threads(2)
    others_have_failed = threading.Event()

    def fail(item: int) -> None:
        if item == 0:
            assert others_have_failed.wait(PATIENCE)
        elif item == 9:  # the one thread that is left has been through all before it
            others_have_failed.set()
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        at_once(fail, range(10))
    assert not [thread for thread in threading.enumerate() if "tasks" in thread.name]


@pytest.mark.parametrize("name", LEARNERS)
def test_update_is_the_same_bit_for_bit_for_any_number_of_threads(name: str) -> None:
    # Of more parameters, some 9,000, MKL splits the dot products of conjugate gradients as well.
    policy = make_policy("normal", torch.float32, hidden_sizes=(64, 64))
    start = own_params(policy)
    tasks = draw_tasks(
        policy,
        RATES,
        objective=make_learner(name, policy).objective,
        lengths=lambda task: [40 + task] * 30,  # so many rows that torch would share them out
    )
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        policy.load_state_dict(start)
        report = make_learner(name, policy, step_sizes=RATES).update(tasks)
        assert report.accepted, report.reason
        found.append((report, own_params(policy)))
    for report, params in found[1:]:
        assert report == found[0][0]
        assert all(torch.equal(value, found[0][1][key]) for key, value in params.items())


class NotingPolicy(NormalMLPPolicy):
    """Notes the threads that call it, as a policy of one's own may."""

    def __init__(self) -> None:
        super().__init__(2, 2, (4,))
        self.callers = set[int]()

    def forward(self, observations: Tensor, params: Params | None = None) -> Distribution:
        self.callers.add(threading.get_ident())
        return super().forward(observations, params)


class NotingDistributionPolicy(NormalMLPPolicy):
    """The same where the network is ours."""

    def __init__(self) -> None:
        super().__init__(2, 2, (4,))
        self.callers = set[int]()

    def _distribution(self, outputs: Tensor, params: Params) -> Distribution:
        self.callers.add(threading.get_ident())
        return super()._distribution(outputs, params)


@pytest.mark.parametrize("make", [NotingPolicy, NotingDistributionPolicy])
@pytest.mark.parametrize("name", LEARNERS)
def test_policy_of_ones_own_is_called_by_one_thread_alone(
    name: str, make: type[NotingPolicy | NotingDistributionPolicy]
) -> None:
    torch.set_num_threads(2)
    policy = make()
    learner = make_learner(name, policy, step_sizes=RATES, stack_below_rows=0)
    learner.update(draw_tasks(policy, RATES, objective=learner.objective))
    assert policy.callers == {threading.get_ident()}


@pytest.mark.parametrize("name", LEARNERS)
def test_hook_is_called_by_one_thread_alone(name: str) -> None:
    torch.set_num_threads(2)
    policy, callers = NormalMLPPolicy(2, 2, (4,)), set[int]()
    policy.register_forward_hook(lambda *_: callers.add(threading.get_ident()))
    learner = make_learner(name, policy, step_sizes=RATES, stack_below_rows=0)
    learner.update(draw_tasks(policy, RATES, objective=learner.objective))
    assert callers == {threading.get_ident()}
