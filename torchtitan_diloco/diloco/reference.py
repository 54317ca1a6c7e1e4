"""The whole algorithm for M workers in one process: plain tensors, no threads, no sharding, no buffers.

To be read beside Algorithm 2 of arXiv 2501.18512, and slow. It is the yardstick of the tests: StreamingDiLoCo must compute
what stands here. The outer step is torch's own optimizer, so that it does not share its mistakes with outer_optimizer.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan_diloco.diloco.config import OuterOptimizer

Fragment = list[str]
"""Names of parameters."""
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Sender:
    """Who sends what: a worker its own delta, or the group (worker -1) the mean of it that goes back."""

    worker: int
    fragment: int
    t: int


def as_it_is(_: Sender, values: Values) -> Values:
    return values


@dataclass
class InFlight:
    sent: int
    fragment: int
    mean: Values


class ReferenceDiLoCo:
    def __init__(
        self,
        workers: Sequence[nn.Module],
        fragments: list[Fragment],
        *,
        sync_every: int,
        delay: int,
        mixing: float,
        outer: OuterOptimizer,
        transmit: Callable[[Sender, Values], Values] = as_it_is,
        gather: Callable[[Sender, Values], Values] = as_it_is,
        feedback: bool = False,
    ) -> None:
        """`transmit`: what a fragment's delta is after it has been encoded, sent and decoded; `gather`: the same of the mean
        that goes back. `feedback`: what was lost of a delta is added to the next one."""
        self.H, self.tau, self.alpha = sync_every, delay, mixing
        self.fragments, self.outer, self.transmit, self.gather = fragments, outer, transmit, gather
        self.feedback, self.lost = feedback, [dict[str, Tensor]() for _ in workers]
        self.theta = [dict(worker.named_parameters()) for worker in workers]
        self.Theta = {name: value.detach().float().clone() for name, value in self.theta[0].items()}
        self.flying: list[InFlight] = []
        self.optimizers = [
            self._outer_optimizer([self.Theta[name] for name in names]) for names in fragments
        ]
        self.t = 0
        for theta in self.theta:  # everybody starts from worker 0
            self._mix(theta, list(self.Theta), alpha=0.0)

    @torch.no_grad()
    def step(self, weights: Sequence[float] | None = None) -> None:
        """After inner step t of all workers. A weight of 0 leaves a worker out of the means sent now."""
        self.t += 1
        t, P = self.t, len(self.fragments)
        for p in range(P):
            t_p = p * max(1, self.H // P) % self.H
            if t >= self.H and (t - t_p) % self.H == 0:  # SEND
                self.flying.append(
                    InFlight(t, p, self._mean_delta(p, weights or [1.0] * len(self.theta)))
                )
        for message in [
            message for message in self.flying if message.sent == t - self.tau
        ]:  # APPLY
            self._apply(message)

    def drain(self) -> None:
        """Applies what is still in flight."""
        for message in list(self.flying):
            self._apply(message)

    @torch.no_grad()
    def _apply(self, message: InFlight) -> None:
        self.flying.remove(message)
        self._outer_step(message)
        for theta in self.theta:
            self._mix(theta, self.fragments[message.fragment], self.alpha)

    def _mean_delta(self, p: int, weights: Sequence[float]) -> Values:
        """As a running mean over the workers, so that its rounding, which a codec may blow up, is that of the real thing."""
        mean, total = {name: torch.zeros_like(self.Theta[name]) for name in self.fragments[p]}, 0.0
        for m, weight in enumerate(weights):
            if weight:
                total += weight
                arrived = self._arrived(m, p)
                mean = {
                    name: torch.lerp(mean[name], arrived[name], weight / total) for name in mean
                }
        return self.gather(Sender(-1, p, self.t), mean)

    def _arrived(self, m: int, p: int) -> Values:
        """The delta of a worker as all decode it."""
        theta, lost = self.theta[m], self.lost[m]
        delta = {}
        for name in self.fragments[p]:
            held = (
                self.Theta[name].to(theta[name].dtype).float()
            )  # differs from Theta below fp32 only
            delta[name] = held - theta[name].float()
            if self.feedback:
                delta[name] = delta[name] + lost.get(name, torch.zeros_like(delta[name]))
        arrived = self.transmit(Sender(m, p, self.t), delta)
        lost.update({name: delta[name] - arrived[name] for name in delta})
        return arrived

    def _outer_step(self, message: InFlight) -> None:
        for name, gradient in message.mean.items():
            self.Theta[name].grad = gradient
        self.optimizers[message.fragment].step()

    def _mix(self, theta: dict[str, nn.Parameter], names: Fragment, alpha: float) -> None:
        for name in names:
            theta[name].data.copy_(alpha * theta[name].float() + (1 - alpha) * self.Theta[name])

    def _outer_optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        outer = self.outer
        if outer.name == "adam":
            betas = (outer.momentum, outer.beta2)
            return torch.optim.Adam(
                parameters, lr=outer.lr, betas=betas, eps=outer.epsilon, foreach=False
            )
        if outer.name == "sign_momentum":
            return SignMomentum(parameters, lr=outer.lr, momentum=outer.momentum)
        momentum = 0.0 if outer.name == "sgd" else outer.momentum
        nesterov = outer.name == "nesterov" and momentum > 0
        return torch.optim.SGD(
            parameters, lr=outer.lr, momentum=momentum, nesterov=nesterov, foreach=False
        )


class SignMomentum(torch.optim.Optimizer):
    def __init__(self, parameters: list[Tensor], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                buffer = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(group["lr"] * buffer.sign())
