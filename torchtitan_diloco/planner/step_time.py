"""The compute of one inner step: given, or worked out from what the hardware can do. Never guessed."""

from collections.abc import Mapping

from torchtitan_diloco.planner.units import format_duration, parse_duration, parse_share

REMEDY = "give --step-time (seconds of compute of one inner step), or --mfu with --device or --peak-tflops, or --probe to measure it"


def one_for_each(values: list[float], workers: int, flag: str) -> tuple[float, ...]:
    """One value for all workers, or a list with one for each."""
    if len(values) not in (1, workers):
        raise ValueError(
            f"{flag} lists {len(values)} values, and there are {workers} workers: give one for all, or {workers}"
        )
    return tuple(values * workers if len(values) == 1 else values)


def parse_step_times(text: str, workers: int) -> tuple[float, ...]:
    """Seconds, also as a bare number."""
    seconds = [_seconds(word.strip()) for word in text.split(",")]
    return one_for_each(seconds, workers, "--step-time")


def step_seconds_from_flops(
    flops: float,
    ranks: int,
    mfu: str | None,
    peak_tflops: float | None,
    device: str | None,
    peaks: Mapping[str, float],
) -> tuple[float, str]:
    """Of one worker with so many `ranks`, and how it came about. `peaks`: FLOP/s of the devices that are known."""
    if mfu is None:
        given = (
            f'--device "{device}"'
            if device is not None
            else "--peak-tflops"
            if peak_tflops is not None
            else ""
        )
        reason = (
            f"{given} says what the hardware could do, not what it does"
            if given
            else "the step time is not known"
        )
        raise ValueError(f"{reason}: {REMEDY}")
    share = parse_share(mfu, "--mfu")
    if not 0 < share <= 1:
        raise ValueError(
            f'--mfu "{mfu}" cannot be: give the share of the peak that training reaches, such as 40%'
        )
    if (device is None) == (peak_tflops is None):
        problem = "is a share of an unknown peak" if device is None else "has two peaks"
        raise ValueError(
            f"--mfu {mfu} {problem}: give one of --device ({', '.join(peaks)}) and --peak-tflops"
        )
    peak = 1e12 * peak_tflops if peak_tflops is not None else _peak_of(str(device), peaks)
    if not peak > 0:
        raise ValueError(
            f"--peak-tflops {peak / 1e12:g} cannot be: give the device's bf16 peak, such as 989"
        )
    seconds = flops / (ranks * peak * share)
    origin = f"{flops:.3g} FLOP / ({ranks} x {peak / 1e12:g} TFLOP/s x {100 * share:g} %) = {format_duration(seconds)}"
    return seconds, origin


def _peak_of(device: str, peaks: Mapping[str, float]) -> float:
    wanted = {name.lower(): flops for name, flops in peaks.items()}
    if device.lower() not in wanted:
        raise ValueError(
            f'--device "{device}" is not known: take one of {", ".join(peaks)}, or give --peak-tflops'
        )
    return wanted[device.lower()]


def _seconds(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return parse_duration(word, "--step-time")
