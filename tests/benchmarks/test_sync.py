"""Sync islands through a folder once."""

from benchmarks import sync


def test_two_islands_sync_through_a_folder() -> None:
    (measured,), memory = sync.measure_in_processes(sync.Case(1, "fp4_e3m0", through="folder"))
    exposed, _, server, sent = measured
    assert exposed > 0
    assert server > 0
    assert 4.3 < sent < 4.4
    assert memory > 0


def test_rows_are_those_of_the_chosen_kinds() -> None:
    cases = sync.sync_cases(
        ["fp32", "fp4_e3m0"], ["gloo", "folder", "serve"], sync.Case(2, delay=1)
    )
    assert [*cases] == [
        *("fp32", "fp32, measured", "fp4_e3m0"),
        *("folder, fp32", "folder, fp4_e3m0", "serve, fp32", "serve, fp4_e3m0"),
    ]
    assert all(case.delay == 1 for case in cases.values())
