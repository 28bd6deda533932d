"""Tasks for the tests of learning: phases drawn on policy, and plain oracles of an outer loss."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal, kl_divergence

from asyncmaml.learning.adaptation import adapt
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.policies import (
    CategoricalMLPPolicy,
    MLPPolicy,
    MultiCategoricalMLPPolicy,
    NormalMLPPolicy,
)

KINDS = ("categorical", "normal", "multi")


def make_policy(
    kind: str,
    dtype: torch.dtype = torch.float64,
    hidden_sizes: Sequence[int] = (4,),
    nonlinearity: str = "tanh",
) -> MLPPolicy:
    """Return a policy of 2 numbers in and 2 (normal, categorical) or 2 x 3 (multi) out."""
    policy: MLPPolicy
    if kind == "categorical":
        policy = CategoricalMLPPolicy(2, 4, hidden_sizes, nonlinearity)
    elif kind == "normal":
        policy = NormalMLPPolicy(2, 2, hidden_sizes, nonlinearity, init_std=0.8)
    else:
        policy = MultiCategoricalMLPPolicy(2, (2, 3), hidden_sizes, nonlinearity)
    return policy.to(dtype)


class PlainPolicy(nn.Module):
    """A policy that knows nothing of parameters from outside, nor of stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, observations: Tensor) -> Distribution:
        return Independent(Normal(self.network(observations), self.log_std.exp()), 1)


def own_params(policy: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def draw_phase(
    policy: nn.Module, params: Params, lengths: Sequence[int], generator: torch.Generator
) -> Phase:
    """Draw a phase of random observations and advantages, on policy, with NaN-free padding."""
    dtype = next(iter(params.values())).dtype
    shape = max(lengths), len(lengths)
    mask = (torch.arange(shape[0]).unsqueeze(1) < torch.tensor(lengths)).to(dtype)

    def noise(*more: int) -> Tensor:
        return torch.randn(*shape, *more, generator=generator, dtype=torch.float64).to(dtype)

    observations = noise(2) * mask.unsqueeze(-1)
    with torch.no_grad():
        distribution = policy(observations, params)
        # Seeded by the generator's own next number: distributions draw from the global one.
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
            actions = distribution.sample()
        taken = mask.reshape(*mask.shape, *[1] * (actions.ndim - 2))
        actions = actions * taken.to(actions.dtype)
        log_probs = torch.where(mask > 0, distribution.log_prob(actions), 0.0)
    rewards = noise() * mask
    centred = (rewards - rewards.sum() / mask.sum()) * mask
    advantages = centred / ((centred.square().sum() / mask.sum()).sqrt() + 1e-8)
    return Phase(
        observations, actions, mask, advantages, rewards, log_probs, float(rewards.sum(0).mean())
    )


def draw_tasks(
    policy: nn.Module,
    step_sizes: Sequence[float],
    *,
    objective: str = "log_likelihood",
    num_tasks: int = 3,
    seed: int = 0,
    lengths: Callable[[int], Sequence[int]] = lambda task: (3, 1 + task, 2),
) -> list[tuple[Phase, ...]]:
    """Draw ragged tasks of K + 1 phases, each phase with the parameters adapted so far."""
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for task in range(num_tasks):
        params = own_params(policy)
        phases = [draw_phase(policy, params, lengths(task), generator)]
        for step_size in step_sizes:
            params = adapt(
                policy,
                params,
                phases[-1],
                step_size=step_size,
                objective=objective,
                first_order=True,
            )
            params = {name: parameter.detach() for name, parameter in params.items()}
            phases.append(draw_phase(policy, params, lengths(task), generator))
        tasks.append(tuple(phases))
    return tasks


# ---- oracles: one task at a time, unpadded rows, torch.func for derivatives ----


def valid_rows(phase: Phase) -> tuple[Tensor, ...]:
    """Observations, actions, advantages and log_probs of the steps taken, `(n, ...)`."""
    taken = phase.mask.bool()
    tensors = phase.observations, phase.actions, phase.advantages, phase.log_probs
    return tuple(tensor[taken] for tensor in tensors)


def plain_inner_loss(policy: nn.Module, params: Params, phase: Phase, objective: str) -> Tensor:
    """The inner loss by its definition, with a loop over episodes and steps."""
    distribution = policy(phase.observations, params)
    log_probs = distribution.log_prob(phase.actions)
    total, count = log_probs.new_zeros(()), 0
    for episode in range(phase.mask.shape[1]):
        product = log_probs.new_ones(())
        for step in range(int(phase.mask[:, episode].sum())):
            advantage = phase.advantages[step, episode]
            ratio = (log_probs[step, episode] - phase.log_probs[step, episode]).exp()
            if objective == "log_likelihood":
                total = total + log_probs[step, episode] * advantage
            elif objective == "likelihood_ratio":
                total = total + ratio * advantage
            else:
                total = total + product * (ratio - 1) * advantage
                product = product * ratio
            count += 1
    assert isinstance(total, Tensor)
    return -(total / count)


def plain_adapted(
    policy: nn.Module,
    theta: Params,
    phases: Sequence[Phase],
    step_sizes: Sequence[float],
    objective: str,
) -> list[dict[str, Tensor]]:
    """theta_0 to theta_K by `torch.func.grad`, differentiable."""
    points = [dict(theta)]
    for phase, step_size in zip(phases, step_sizes, strict=True):

        def loss(params: dict[str, Tensor], phase: Phase = phase) -> Tensor:
            return plain_inner_loss(policy, params, phase, objective)

        gradient = torch.func.grad(loss)(points[-1])
        points.append(
            {name: value - step_size * gradient[name] for name, value in points[-1].items()}
        )
    return points


def plain_outer_loss(
    policy: nn.Module,
    theta: Params,
    tasks: Sequence[Sequence[Phase]],
    step_sizes: Sequence[float],
    objective: str,
) -> Tensor:
    """Mean over tasks of -<A' pi_theta' / pi_old>."""
    losses = []
    for phases in tasks:
        points = plain_adapted(policy, theta, phases[:-1], step_sizes, objective)
        observations, actions, advantages, log_probs = valid_rows(phases[-1])
        ratio = (policy(observations, points[-1]).log_prob(actions) - log_probs).exp()
        losses.append(-(ratio * advantages).mean())
    return torch.stack(losses).mean()


def plain_outer_kl(
    policy: nn.Module,
    theta: Params,
    old: Params,
    tasks: Sequence[Sequence[Phase]],
    step_sizes: Sequence[float],
    objective: str,
) -> Tensor:
    """Mean over tasks of KL(old || new) of the adapted policies."""
    divergences = []
    for phases in tasks:
        new_point = plain_adapted(policy, theta, phases[:-1], step_sizes, objective)[-1]
        old_point = plain_adapted(policy, old, phases[:-1], step_sizes, objective)[-1]
        observations = valid_rows(phases[-1])[0]
        divergence = kl_divergence(policy(observations, old_point), policy(observations, new_point))
        divergences.append(divergence.mean())
    return torch.stack(divergences).mean()


def flat(params: Params, policy: nn.Module) -> Tensor:
    """In the order of `named_parameters()`."""
    return torch.cat([params[name].reshape(-1) for name, _ in policy.named_parameters()])


def unflat(vector: Tensor, policy: nn.Module) -> dict[str, Tensor]:
    parts = torch.split(vector, [own.numel() for own in policy.parameters()])
    return {
        name: part.reshape(own.shape)
        for (name, own), part in zip(policy.named_parameters(), parts, strict=True)
    }
