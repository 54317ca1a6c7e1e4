"""The table of presets follows from the settings of the presets."""

from torchtitan_diloco.planner.presets import presets_table


def test_the_numbers_of_a_preset() -> None:
    rows = [line.split("|") for line in presets_table(gpus=4, mfu=0.5).splitlines()]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows if len(row) > 1}
    parameters, tokens, gpus, memory, time, disk, sent = cells["1b"]
    assert (parameters, tokens, gpus) == ("1,280M", "25.6B", "2 x 4")
    assert float(memory) == 8.3, "(16 + 12) bytes x 1.28e9 / 4 GPUs in GiB"
    hours = 6 * 1.28e9 * 25.6e9 / (8 * 989e12 * 0.5) / 3600  # and some more for attention
    assert hours < int(time.split(":")[0]) < 1.3 * hours
    assert float(disk) == 51.2, "two bytes a token"
    exchanged = 65_098 / 30 * 4.125 / 8 * 1.28  # GB
    assert 0.99 * exchanged < float(sent.replace(",", "")) < 1.01 * exchanged
    assert "debug" not in cells, "which trains on CPUs"
    assert float(cells["llama-8b"][5]) == 40.0, "four bytes a token"
