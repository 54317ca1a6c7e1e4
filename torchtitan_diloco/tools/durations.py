"""Seconds as people read them."""


def clock(seconds: float) -> str:
    """`2d 3:04:05`."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{rest:02d}"


def brief(seconds: float) -> str:
    """`1.23 s` or `45.6 ms`."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.1f} ms"
