"""Descriptions of an outer loop for users."""

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.hardware import GIB
from torchtitan_diloco.diloco.codecs import describe as describe_codec
from torchtitan_diloco.diloco.config import OuterOptimizer
from torchtitan_diloco.diloco.loop import Loop


def describe(loop: Loop) -> list[str]:
    """Describe settings, wire format, memory and fragments for the start of a run."""
    config = loop.config
    states = loop.states
    overlap = config.overlap
    first = config.beginning
    weight = f"{overlap.mixing:g}"
    end = overlap.mixing_end
    if end is not None and end != overlap.mixing:
        verb = "falls" if end < overlap.mixing else "rises"
        weight = f"{verb} from {weight} to {end:g}"
    every = "step" if config.sync_every == 1 else f"{config.sync_every:,} steps"
    beginning = (
        f"{'':<10} in the first {counted(int(first.length), 'step')} every "
        f"{counted(first.sync_every, 'step')}, averaged and waited for"
    )
    memory = sum(state.bytes for state in states)
    place = "GPU" if states[0].outer.is_cuda else "host"
    kept = ["shared parameters", "one delta" if states[0].sent is None else "two deltas"]
    if states[0].slots:
        kept.insert(1, "the outer optimizer")
    sizes = [fragment.megabytes for fragment in loop.fragments]
    turns = f"the whole model, {sizes[0]:,.2f} MB in fp32"
    if len(sizes) > 1:
        turns = (
            f"{len(sizes)} of {min(sizes):,.2f} to {max(sizes):,.2f} MB in fp32, in turn after "
            f"steps {', '.join(map(str, _turns(loop)))} of each {config.sync_every}"
        )
    return [
        f"{'outer':<10} each fragment every {every}, applied {counted(overlap.delay, 'step')} "
        f"later; local weight {weight}; {_optimizer(config.outer_optimizer)}",
        *([beginning] if first.length else []),
        f"{'wire':<10} {describe_codec(config.quantization)}; summed in fp32",
        f"{'':<10} {memory / GIB:.2f} GiB a rank on the {place} for {', '.join(kept)}",
        f"{'fragments':<10} {turns}",
    ]


def _optimizer(outer: OuterOptimizer) -> str:
    """Describe the outer optimizer, with the settings that it reads."""
    warmup = ""
    if outer.warmup:
        length = counted(int(outer.warmup), "step")
        if outer.warmup < 1:  # an island, which counts tokens, knows no steps of the run
            length = f"{outer.warmup:.0%} of the run"
        warmup = f" after a warm-up of {length}"
    numbers = [f"{name} {getattr(outer, name):g}" for name in outer.rule.reads]
    return " ".join([f"{outer.name} lr {outer.lr:g}{warmup}", *numbers])


def table(loop: Loop) -> str:
    """Return a table of the fragments and their slots in the cycle."""
    lines = [f"{'fragment':>8}  {'slot':>5}  {'parameters':>13}  {'MB (fp32)':>9}  modules"]
    for fragment, slot in zip(loop.fragments, _turns(loop), strict=True):
        sizes = f"{fragment.parameters:>13,}  {fragment.megabytes:>9,.2f}"
        lines.append(f"{fragment.index:>8}  {slot:>5}  {sizes}  {fragment.name}")
    return "\n".join(lines)


def _turns(loop: Loop) -> list[int]:
    """Return the step of a cycle after which each fragment is sent."""
    return [loop.schedule.offset(index) for index in range(len(loop.fragments))]
