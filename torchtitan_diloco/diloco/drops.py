"""Rounds that a worker misses on purpose (paper B's robustness study): a pure function, so a restart repeats them."""

import hashlib


def is_dropped(probability: float, seed: int, worker: int, fragment: int, outer_round: int) -> bool:
    if not probability:
        return False
    digest = hashlib.sha256(f"{seed}/{worker}/{fragment}/{outer_round}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < probability * 2**64
