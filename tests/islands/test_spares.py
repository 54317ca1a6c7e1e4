"""Memory that is used again."""

from torchtitan_diloco.islands.spares import Spares


def test_the_smallest_memory_that_fits_is_used_again() -> None:
    spares = Spares(2)
    large = spares.take(10_000)
    small = spares.take(100)
    large[:3] = b"old"
    spares.give(large[:5])
    spares.give(small)
    assert spares.take(50).obj is small.obj
    again = spares.take(9_000)
    assert again.obj is large.obj
    assert len(again) >= 10_000
    assert spares.take(50).obj not in (small.obj, large.obj), "nothing else was given back"


def test_no_more_memory_is_kept_than_wanted() -> None:
    for most in (0, 1):
        spares = Spares(most)
        given = [spares.take(100) for _ in range(3)]
        for memory in given:
            spares.give(memory)
        taken = [spares.take(100).obj for _ in range(3)]
        assert len([memory for memory in given if memory.obj in taken]) == most
