"""The other workers, as the outer loop sees them.

`StreamingDiLoCo` takes deltas, applies shared copies, heals and measures. Its peers say when, and
turn the deltas of all workers into the next shared copies. There are two kinds: `GlooPeers`, the
workers of one job, and `IslandPeers`, separate jobs that meet in a store.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.background import ENCODING_THREADS, BackgroundThread
from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.hardware import GIB
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.diloco.arithmetic import slot_count
from torchtitan_diloco.diloco.codecs import build_codec, describe
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.flags import DROPPED, WENT_WRONG
from torchtitan_diloco.diloco.fragments import Fragment, build_fragments
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import OuterState, pick_state_device
from torchtitan_diloco.diloco.round import Meter, Round
from torchtitan_diloco.diloco.schedule import Schedule, build_schedule
from torchtitan_diloco.diloco.state_dict import OuterFacts, SavedState
from torchtitan_diloco.diloco.witness import Witness


@dataclass(frozen=True)
class Send:
    """Take the delta of `round.fragment` now."""

    round: Round


@dataclass(frozen=True)
class Apply:
    """Apply a shared copy of `round.fragment` now."""

    round: Round
    copy: Tensor
    mode: Mode
    share: float = 0.0
    """Weight of the local parameters for `MIX`."""


class Peers(ABC):
    """What the outer loop needs to know of the other workers.

    To add a kind of peers, implement the abstract methods, and pass an instance to
    `StreamingDiLoCo` as its group.
    """

    makes_outer_steps = True
    """Whether the shared copies are computed here, with the outer optimizer."""
    workers = 1
    """Number of workers in each exchange."""
    worker = 0
    """Index of this worker."""
    step = 0
    """Inner steps so far."""
    in_flight: Mapping[int, object] = {}
    """Fragments that every worker has sent and not applied yet."""
    model: nn.Module
    config: DiLoCoConfig
    fragments: tuple[Fragment, ...]
    schedule: Schedule
    states: list[OuterState]
    """Buffers of each fragment."""
    meter: Meter
    background: BackgroundThread

    # --- start and end ----------------------------------------------------------------------------

    def start(self, model: nn.Module, config: DiLoCoConfig) -> None:
        """Check the settings, agree with the other workers, and allocate the buffers."""
        if hasattr(self, "states"):
            raise RuntimeError("these peers already belong to an outer loop: create new ones")
        self.model = model
        self.meter = Meter()
        self.config = config = self.check_settings(config)
        drop_gathered(model)
        self.fragments = build_fragments(model, config.fragments)
        self.schedule = build_schedule(config, len(self.fragments))
        has_optimizer = self.makes_outer_steps
        device = pick_state_device(self.fragments, config, has_optimizer=has_optimizer)
        self.agree(device)
        is_sparse = build_codec(config.quantization).is_sparse
        self.states = [
            OuterState(
                fragment,
                config.outer_optimizer,
                device,
                is_sparse=is_sparse,
                has_optimizer=has_optimizer,
            )
            for fragment in self.fragments
        ]
        self.background = BackgroundThread("diloco-exchange", torch_threads=ENCODING_THREADS)
        self.prepare_to_send()

    @abstractmethod
    def check_settings(self, config: DiLoCoConfig) -> DiLoCoConfig:
        """Raise an error for settings that do not fit, and return the settings to train with."""

    def agree(self, device: torch.device) -> None:  # noqa: B027 - islands agree when they join
        """Raise an error if workers differ, and make their parameters equal, before buffers copy
        them.

        `device`: device of the buffers.
        """

    @abstractmethod
    def prepare_to_send(self) -> None:
        """Prepare to send, once there are buffers."""

    @abstractmethod
    def close(self) -> None:
        """End the threads."""

    # --- training thread --------------------------------------------------------------------------

    @abstractmethod
    def due_tasks(self, weight: float, reset: Collection[int]) -> Iterator[Send | Apply]:
        """Count an inner step. Yield what to do after it, in order, after waiting if it must.

        `reset`: fragments that were reset to the shared parameters after this step, or before it,
        since the last call.
        The loop does each before it asks for the next one. Once it has taken a delta, the peers
        turn it into the next shared copy in the background.
        """

    @abstractmethod
    def remaining_tasks(self) -> Iterator[Send | Apply]:
        """Yield what is left to do after the last step."""

    @abstractmethod
    def check(self) -> None:
        """Raise if a worker is lost or an exchange has failed."""

    @property
    @abstractmethod
    def progress(self) -> float:
        """Completed share of the run, 0 if its length is unknown."""

    @property
    @abstractmethod
    def witness(self) -> Witness:
        """Answers who is late, and what the workers have said of themselves."""

    def advise(self, settings: Mapping[str, object]) -> str:
        """Return the command with which users change settings."""
        return " ".join(f"--{key} {value}" for key, value in settings.items())

    @property
    def offsets(self) -> list[int]:
        """Slot of each fragment in the cycle."""
        return [self.schedule.offset(index) for index in range(len(self.fragments))]

    def describe(self) -> list[str]:
        """Describe settings, wire format, memory and fragments for the start of a run."""
        config = self.config
        states = self.states
        overlap = config.overlap
        outer = config.outer_optimizer
        first = config.beginning
        weight = f"{overlap.mixing:g}"
        end = overlap.mixing_end
        if end is not None and end != overlap.mixing:
            verb = "falls" if end < overlap.mixing else "rises"
            weight = f"{verb} from {weight} to {end:g}"
        every = "step" if config.sync_every == 1 else f"{config.sync_every:,} steps"
        momentum = f" momentum {outer.momentum:g}" if slot_count(outer) else ""
        beginning = (
            f"{'':<10} in the first {counted(int(first.length), 'step')} every "
            f"{counted(first.sync_every, 'step')}, averaged and waited for"
        )
        memory = sum(state.bytes for state in states)
        place = "GPU" if states[0].outer.is_cuda else "host"
        kept = ["shared parameters", "one delta" if states[0].sent is None else "two deltas"]
        if states[0].slots:
            kept.insert(1, "the outer optimizer")
        sizes = [fragment.megabytes for fragment in self.fragments]
        turns = f"the whole model, {sizes[0]:,.2f} MB in fp32"
        if len(sizes) > 1:
            turns = (
                f"{len(sizes)} of {min(sizes):,.2f} to {max(sizes):,.2f} MB in fp32, in turn after "
                f"steps {', '.join(map(str, self.offsets))} of each {config.sync_every}"
            )
        return [
            f"{'outer':<10} each fragment every {every}, applied {counted(overlap.delay, 'step')} "
            f"later; local weight {weight}; {outer.name} lr {outer.lr:g}{momentum}",
            *([beginning] if first.length else []),
            f"{'wire':<10} {describe(config.quantization)}; summed in fp32",
            f"{'':<10} {memory / GIB:.2f} GiB a rank on the {place} for {', '.join(kept)}",
            f"{'fragments':<10} {turns}",
        ]

    # --- restart ----------------------------------------------------------------------------------

    @abstractmethod
    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        """Return the buffers and everything else that a restart needs. Wait for exchanges in
        flight."""

    @abstractmethod
    def load(self, saved: SavedState) -> list[str]:
        """Fill the buffers. Return a line for each thing that could not be kept."""

    @abstractmethod
    def restart(self) -> None:
        """Drop what is in flight, because the buffers start over."""


def close(
    background: BackgroundThread, exchange: Exchange | None, liveness: Liveness, owns_liveness: bool
) -> None:
    """End the threads of an outer loop. `owns_liveness`: whether it created `liveness` itself."""
    background.close(timeout=0.0 if liveness.is_lost else 5.0)
    if exchange is not None:
        exchange.close()
    if owns_liveness:
        liveness.close()


def local_share(usual: float, flags: int, participants: int) -> float:
    """Return the weight of local parameters: 0 if they are unusable, 1 for dropped workers."""
    if flags & WENT_WRONG:
        return 0.0
    return 1.0 if flags & DROPPED or not participants else usual
