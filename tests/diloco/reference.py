"""Slow single-process implementation for M workers, to be read with Algorithm 2 of 2501.18512.

Tests compare StreamingDiLoCo with it. Its outer step is torch's optimizer, so that it does not
share mistakes with outer_step.py.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_diloco.diloco.config import DiLoCoConfig, OuterOptimizer

Values = dict[str, Tensor]
Transmit = Callable[[Values], Values]
"""Encodes, sends and decodes values."""


class MeanInFlight(NamedTuple):
    sent: int
    fragment: int
    mean: Values
    deltas: list[Values]
    """Of each worker, before they are encoded."""


class ReferenceDiLoCo:
    def __init__(
        self,
        workers: Sequence[nn.Module],
        fragments: list[list[str]],
        config: DiLoCoConfig,
        *,
        total_steps: int = 1,
        transmit: Transmit = lambda delta: delta,
        gather: Transmit = lambda mean: mean,
    ) -> None:
        """`fragments`: parameter names. `transmit`: of deltas. `gather`: of the mean."""
        self.config = config
        self.T = total_steps
        self.fragments = fragments
        self.transmit = transmit
        self.gather = gather
        self.is_sparse = config.quantization.format.is_sparse
        self.theta = [dict(worker.named_parameters()) for worker in workers]
        self.Theta = {name: value.detach().float().clone() for name, value in self.theta[0].items()}
        self.in_flight: list[MeanInFlight] = []
        self.optimizers = [
            build_optimizer(config.outer_optimizer, [self.Theta[name] for name in names])
            for names in fragments
        ]
        self.t = 0
        for theta in self.theta:  # all start from worker 0
            self._mix(theta, list(self.Theta), alpha=0.0)

    @torch.no_grad()
    def step(self, weights: Sequence[float] | None = None) -> None:
        """Call after inner step t of all workers. Those of weight 0 are left out of means."""
        self.t += 1
        t = self.t
        P = len(self.fragments)
        H = self.config.sync_every
        tau = self.config.overlap.delay
        is_beginning = t <= self.config.beginning.length
        if is_beginning:
            H = self.config.beginning.sync_every
            tau = 0
        for p in range(P):
            t_p = p * max(1, H // P) % H
            if t >= H + t_p and (t - t_p) % H == 0:  # SEND
                deltas = [self._delta(m, p) for m in range(len(self.theta))]
                mean = self._mean_delta(p, deltas, weights or [1.0] * len(self.theta))
                self.in_flight.append(MeanInFlight(t, p, mean, deltas))
        for message in [one for one in self.in_flight if one.sent == t - tau]:  # APPLY
            self._apply(message, average=is_beginning)

    def drain(self) -> None:
        for message in list(self.in_flight):
            self._apply(message)

    @torch.no_grad()
    def _apply(self, message: MeanInFlight, *, average: bool = False) -> None:
        self.in_flight.remove(message)
        begin = self.config.overlap.mixing
        end = self.config.overlap.mixing_end
        alpha = begin if end is None else begin + (end - begin) * self.t / self.T
        before = {name: self.Theta[name].clone() for name in message.mean}
        if average:
            alpha = 0.0
            for name, delta in message.mean.items():
                self.Theta[name] -= delta
        else:
            for name, delta in message.mean.items():
                self.Theta[name].grad = delta
            optimizer = self.optimizers[message.fragment]
            optimizer.param_groups[0]["lr"] = self._outer_lr(message.sent)
            optimizer.step()
        for theta, sent in zip(self.theta, message.deltas, strict=True):
            if self.is_sparse:
                for name, delta in sent.items():
                    change = self.Theta[name] - before[name]
                    theta[name].data += torch.where(change == 0, 0.0, change + delta)
            else:
                self._mix(theta, self.fragments[message.fragment], alpha)

    def _outer_lr(self, t: int) -> float:
        outer = self.config.outer_optimizer
        B = self.config.beginning.length
        warmup = outer.warmup * self.T if outer.warmup < 1 else outer.warmup
        return outer.lr * min(1.0, (t - B) / warmup) if warmup else outer.lr

    def _mean_delta(self, p: int, deltas: list[Values], weights: Sequence[float]) -> Values:
        """Return a running mean over the workers that sent a value, rounded as in the exchange: a
        codec may magnify errors."""
        mean, total = (
            {name: torch.zeros_like(self.Theta[name]) for name in self.fragments[p]}
            for _ in range(2)
        )
        for one, weight in zip(deltas, weights, strict=True):
            if weight:
                for name, delta in self.transmit(one).items():
                    sent = torch.ones_like(delta) if not self.is_sparse else (delta != 0).float()
                    total[name] += weight * sent
                    share = (weight * sent / total[name]).nan_to_num()  # 0 / 0: nobody has sent
                    mean[name] += (delta - mean[name]) * share
        return self.gather(mean)

    def _delta(self, m: int, p: int) -> Values:
        theta = self.theta[m]
        delta = {}
        for name in self.fragments[p]:
            rounded = self.Theta[name].to(theta[name].dtype).float()  # for models below fp32
            delta[name] = rounded - theta[name].float()
        return delta

    def _mix(self, theta: dict[str, nn.Parameter], names: list[str], alpha: float) -> None:
        for name in names:
            theta[name].data.copy_(alpha * theta[name].float() + (1 - alpha) * self.Theta[name])


def build_optimizer(outer: OuterOptimizer, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return torch's optimizer with the settings of the outer one."""
    if outer.name == "adam":
        betas = outer.momentum, outer.beta2
        return torch.optim.Adam(parameters, lr=outer.lr, betas=betas, eps=outer.epsilon)
    momentum = 0.0 if outer.name == "sgd" else outer.momentum
    nesterov = outer.name == "nesterov" and momentum > 0
    return torch.optim.SGD(parameters, lr=outer.lr, momentum=momentum, nesterov=nesterov)
