"""Large numbers as people write them."""

import argparse
import re

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_quantity(text: str) -> int:
    """1000000, 1_000_000, 1e6, 1M and 1MB are the same."""
    match = re.fullmatch(
        r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([KMGT]?)B?", text.strip(), flags=re.IGNORECASE
    )
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number such as 1000000, 1e6, 1M or 1GB"
        )
    value = float(match[1].replace("_", "")) * _FACTORS[match[2].upper()]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)
