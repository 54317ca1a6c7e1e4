"""One round of one fragment, off the training thread: this worker's delta -> the mean over workers -> the next shared copy."""

import math
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from torchtitan_diloco.diloco.codecs.stochastic import random_key as key_of
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.header import NOT_FINITE, Header
from torchtitan_diloco.diloco.messages import WorkerLostError
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.utils import cause_of, logger


@dataclass(frozen=True)
class Outcome:
    """What the background made of one exchange."""

    participants: int
    """Workers whose delta went into the mean."""
    flags: int
    """This worker's own."""


class BackgroundRound:
    """Called in the background thread, one round after the other, in the same order on every worker."""

    def __init__(
        self,
        exchange: Exchange | None,
        worker: int,
        seed: int,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        """Without an exchange there is one worker, whose delta is the mean."""
        self._exchange, self._worker, self._seed, self._shard_group = (
            exchange,
            worker,
            seed,
            shard_group,
        )

    def __call__(self, state: OuterState, header: Header, facts: Round) -> Outcome:
        facts.begun = time.perf_counter()
        with state.background():
            state.finish_delta()
            norm = state.norm_of_delta()
            facts.delta_square = norm**2
            flags = header.flags if self._is_finite(norm) else header.flags | NOT_FINITE
            header = replace(header, flags=flags, weight=0.0 if flags else header.weight)
            headers = [header] if self._exchange is None else self._average(state, header, facts)
            facts.participants, facts.weight = sum(one.weight > 0 for one in headers), header.weight
            if facts.participants:
                facts.mean_square = state.norm_of_delta() ** 2
                facts.update_square = state.advance()
            else:
                state.keep()
        facts.ready = time.perf_counter()
        self._warn(headers)
        return Outcome(facts.participants, flags)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def _average(self, state: OuterState, header: Header, facts: Round) -> list[Header]:
        assert self._exchange is not None
        shard = 0 if self._shard_group is None else self._shard_group.rank()
        where = self._seed, shard, header.fragment, header.outer_round
        if state.residual is not None and not math.isfinite(
            float(torch.linalg.vector_norm(state.residual))
        ):
            logger.warning(
                f"fragment {header.fragment}: what encoding has lost is not finite any more; it is forgotten"
            )
            state.residual.zero_()
        keys = key_of(*where, self._worker), key_of(*where, "mean")
        headers, facts.traffic = self._exchange.average(state.delta, header, state.residual, keys)
        return headers

    def _is_finite(self, norm: float) -> bool:
        """Of the whole delta of this worker: a shard alone does not know of the others."""
        if self._shard_group is None or self._shard_group.size() == 1:
            return math.isfinite(norm)
        bad = torch.tensor([int(not math.isfinite(norm))])
        try:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._shard_group)
        except RuntimeError as error:
            raise WorkerLostError(
                [self._worker], f"one of the ranks of worker {self._worker}: {cause_of(error)}"
            ) from error
        return not bad.item()

    @staticmethod
    def _warn(headers: list[Header]) -> None:
        for worker, other in enumerate(headers):
            if other.flags & NOT_FINITE:
                logger.warning(
                    f"fragment {other.fragment}, outer round {other.outer_round}: the parameters of worker {worker} are "
                    f"not finite after its step {other.step}; it is left out of this round and takes the shared ones"
                )
