"""What an outer update takes of the memory, in a process of its own."""

import subprocess
import sys

import pytest
from processes import ROOT

SCRIPT = """
import resource
import torch
from asyncmaml.learning.maml_trpo import MAMLTRPO
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.policies import NormalMLPPolicy

torch.set_num_threads(1)
policy = NormalMLPPolicy(17, 6, nonlinearity="tanh")
learner = MAMLTRPO(policy, cg_iterations=2, max_pre_kl=0.01)

def phase(params):
    observations, rewards = torch.randn(100, 20, 17), torch.randn(100, 20)
    with torch.no_grad():
        distribution = policy(observations, params)
        actions = distribution.sample()
        log_probs = distribution.log_prob(actions)
    return Phase(observations, actions, torch.ones(100, 20), rewards, rewards, log_probs, 0.0)

tasks = []
for _ in range(40):
    pre = phase(dict(policy.named_parameters()))
    tasks.append((pre, phase(learner.adapt(pre))))
assert learner.update(tasks).accepted
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_an_update_of_half_cheetahs_full_size_stays_below_2_gib() -> None:
    """40 tasks, 20 episodes, 100 steps, two phases; the process with torch and all."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 2048
