"""torchtitan-diloco plan"""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.synthetic import round_records, step_records, write_run
from torchtitan_diloco.base.hardware import GIB
from torchtitan_diloco.config import load_config, to_toml
from torchtitan_diloco.config.loader import shipped_configs
from torchtitan_diloco.config.schema import flat_settings, portable
from torchtitan_diloco.planner.paper import paper_table
from torchtitan_diloco.planner.plan import (
    main,
    parse_bandwidth,
    parse_duration,
    quantity,
    variant_text,
)
from torchtitan_diloco.planner.prediction import Workload

LINK = ["--bandwidth", "500Mbit", "--latency", "30ms"]
KNOWN = [*LINK, "--step-time", "0.3s"]


def plan(*words: str) -> list[str]:
    return ["--config", "35m", *KNOWN, *words]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", shipped_configs())
def test_every_preset_can_be_planned_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--config", name, *KNOWN)
    conditions = "500 Mbit/s, latency 30 ms one way, steps of 300 ms"
    for part in (f"{name}: ", conditions, "| data parallelism ", "| * H ", "the run takes "):
        assert part in text


@pytest.mark.parametrize(
    ("latency", "words", "expected"),
    [
        ("10ms", [], None),
        ("100ms", [], "12.5 MB in flight, 1.562 MB in each of 8 TCP streams"),
        ("100ms", ["--parallel.fsdp", "4", "--diloco.link.streams", "5"], "each of 8 TCP streams"),
        ("100ms", ["--diloco.link.streams", "2"], "in each of 2 TCP streams .*: set it to 5"),
        ("2s", ["--diloco.link.streams", "32"], "tcp_wmem='4096 16384 15625000'"),
    ],
)
def test_streams_and_buffers_for_a_long_link(
    latency: str, words: list[str], expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    link = ["--bandwidth", "500Mbit", "--latency", latency, "--step-time", "0.3s"]
    text = output(capsys, "--config", "35m", *link, *words)
    assert re.search(expected, text) if expected else "streams" not in text


def table_of(text: str, first_cell: str) -> dict[str, list[str]]:
    """Return the cells of the table with this word in its first cell, by those of its rows."""
    lines = text[text.index(f"| {first_cell} ") :].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {first: rest for first, *rest in (cells[0], *cells[2:])}


def test_the_traffic_and_what_halves_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = plan("--diloco.quantization.codec", "int8", "--price.per_gb", "10")
    words += ["--price.per_million_writes", "5"]
    text = output(capsys, *words)
    table = table_of(text, "each of")
    columns = table.pop("each of")
    assert [*table] == ["2 workers of a job", "2 islands in a provider's bucket", "their syncer"]
    up = columns.index("GB up a run")
    cost = columns.index("of a run")
    of_job, of_islands, syncer = (
        [float(cell.replace(",", "") or "nan") for cell in row] for row in table.values()
    )
    assert of_job[cost] == pytest.approx(2 * 10 * of_job[up], rel=0.05)
    reads = columns.index("reads an hour")
    assert of_job[reads] == 0
    assert syncer[reads] > 7200, "a note of each island in a second"
    assert of_islands[cost] > 10 * (2 * of_islands[up] + syncer[up + 1])
    _, codec, twice = text[text.index("half of these bytes") :].splitlines()
    assert codec.startswith("- --diloco.quantization.codec fp4_e3m0: ")
    assert re.match(r"- --diloco.sync_every \d+: [\d.]+ GB up an hour, ", twice)
    halved = float(twice.rpartition(" ")[2])
    assert halved == pytest.approx(of_job[cost] / 2, rel=0.05)


def test_the_traffic_of_islands_alone_if_they_are_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--islands.join", "runs/shared", "--islands.name", "a"]
    table = table_of(output(capsys, *plan(*words)), "each of")
    assert [*table][1:] == ["2 islands in a folder", "their syncer"]


@pytest.mark.parametrize("islands", ["join s --islands.name a --islands.begin 4", "local 4"])
def test_a_plan_has_as_many_workers_as_the_islands_that_begin(
    capsys: pytest.CaptureFixture[str], islands: str
) -> None:
    text = output(capsys, *plan(*f"--islands.{islands}".split()))
    assert "4 workers x 1 rank" in text
    assert "4 islands in a " in text


def test_the_settings_that_an_island_has_saved_can_be_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"islands.join": "store", "islands.name": "a", "islands.begin": "4"}
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(portable(load_config("35m", given))))
    variant = tmp_path / "variant.toml"
    text = output(capsys, "--config", str(saved), *KNOWN, "--write", str(variant))
    assert [*table_of(text, "each of")][1:] == ["4 islands in a folder", "their syncer"]
    assert "islands" not in variant.read_text()
    s3 = "--islands.join", "s3://bucket"
    text = output(capsys, "--config", str(saved), *KNOWN, *s3)
    assert "4 islands in a provider's bucket" in text
    write_run(tmp_path, step_records(100), ((), ()), saved.read_text())
    assert main(["--run", str(tmp_path)]) == 2
    remedy = f"for one of islands, --config {saved}, --bandwidth and --step-time"
    assert remedy in capsys.readouterr().err


def test_tables_are_written_as_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "mixed.toml"
    phases = '[{start = 0.8, mixture = {"data/c" = 1.0}}]'
    words = ["--data.mixture", "data/web.v1=0.7 data/b=0.3", "--data.phases", phases]
    output(capsys, *plan(*words, "--write", str(written)))
    data = load_config(str(written)).data
    assert data.mixture == {"data/web.v1": 0.7, "data/b": 0.3}
    assert [(phase.start, phase.mixture) for phase in data.phases] == [(0.8, {"data/c": 1.0})]


def test_nothing_halves_few_bits_in_few_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *plan("--training.steps", "100"))
    assert "nothing in this ladder halves these bytes: " in text


def test_the_papers_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper_table() in output(capsys, "--table")


def test_what_a_preset_needs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "--presets", "--gpus", "4", "--mfu", "0.5").splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    cells = {row[1]: row[2:-1] for row in rows}
    parameters, tokens, gpus, memory, time, disk, sent = cells["1b"]
    assert (parameters, tokens, gpus) == ("1,280M", "25.6B", "2 x 4")
    assert float(memory) == 8.3, "(16 + 12) bytes x 1.28e9 / 4 GPUs in GiB"
    plan = Workload.of(load_config("1b-muon"), vocabulary=32_000).plan
    in_bytes = 24 * plan.parameters + 4 * plan.embedding_parameters  # these have a second moment
    assert float(cells["1b-muon"][3]) == round(in_bytes / 4 / GIB, 1)
    hours = 6 * 1.28e9 * 25.6e9 / (8 * 989e12 * 0.5) / 3600  # and some more for attention
    assert hours < int(time.split(":")[0]) < 1.3 * hours
    assert float(disk) == 51.2, "two bytes a token"
    exchanged = 65_098 / 30 * 4.125 / 8 * 1.28  # GB
    assert 0.99 * exchanged < float(sent.replace(",", "")) < 1.01 * exchanged
    assert "debug" not in cells, "which trains on CPUs"
    assert float(cells["llama-8b"][5]) == 40.0, "four bytes a token"


def test_the_plan_is_written_as_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "made/here.toml"
    words = ["--config", "1b", "--bandwidth", "300Mbit", "--step-time", "0.5s"]
    words += ["--diloco.workers", "4", "--write", str(written)]
    output(capsys, *words)
    text = written.read_text()
    assert 'extends = "1b.toml"' in text
    assert "predicted for 300 Mbit/s" in text
    loaded = flat_settings(load_config(str(written)))
    base = flat_settings(load_config("1b"))
    changed = {key: value for key, value in loaded.items() if value != base[key]}
    del changed["run.name"]
    assert changed == {"diloco.workers": 4, "diloco.sync_every": 60, "diloco.overlap.delay": 10}
    assert text.count(" = ") == 1 + len(changed), "only what differs"
    assert main(words) == 2
    assert "File exists: give the path of a new file" in capsys.readouterr().err
    assert written.read_text() == text


def test_a_written_config_extends_from_anywhere(tmp_path: Path) -> None:
    own = tmp_path / "own/1b.toml"
    variant = tmp_path / "variants/1b.toml"
    for path in (own, variant):
        path.parent.mkdir()
    own.write_text('extends = "35m.toml"\n[training]\nbatch_size = 2\n')
    words = ["--config", str(own), *KNOWN, "--training.steps", "5000", "--write", str(variant)]
    assert main(words) == 0
    assert 'extends = "../own/1b.toml"' in variant.read_text()
    training = load_config(str(variant)).training
    assert (training.batch_size, training.steps) == (2, 5000)


def test_a_streaming_variant_of_a_control_averages_its_gradients_in_fp32(tmp_path: Path) -> None:
    control = tmp_path / "control.toml"
    control.write_text(
        'extends = "35m.toml"\ndiloco.method = "none"\nparallel.reduce_dtype = "bfloat16"\n'
    )
    config = load_config(str(control))
    streaming = replace(config.diloco, method="streaming")
    for diloco, expected in ((config.diloco, "bfloat16"), (streaming, "float32")):
        written = tmp_path / f"{diloco.method}.toml"
        written.write_text(
            variant_text(written, str(control), config=config, diloco=diloco, comment="a variant")
        )
        assert load_config(str(written)).parallel.reduce_dtype == expected


def test_given_values_override_measured_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = to_toml(load_config("debug"))
    write_run(tmp_path / "run", step_records(100), round_records(100), settings)
    for flags, expected in (
        ([], "40 Mbit/s, latency 50 ms one way, steps of 458 ms"),
        (["--latency", "70ms"], "40 Mbit/s, latency 70 ms one way, steps of 458 ms"),
        (["--bandwidth", "2Mbit"], "2 Mbit/s, latency 50 ms one way, steps of 458 ms"),
        (["--step-time", "500ms"], "40 Mbit/s, latency 50 ms one way, steps of 500 ms"),
    ):
        words = ["--run", str(tmp_path / "run"), *flags]
        assert re.search(expected.replace("458", "45[0-9.]+"), output(capsys, *words))


def test_a_link_that_was_too_fast_to_be_measured_needs_no_buffers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        [msgspec.structs.replace(record, received_bits_per_second_from={}) for record in records]
        for records in round_records(100)
    ]
    write_run(tmp_path, step_records(100), rounds, to_toml(load_config("debug")))
    text = output(capsys, "--run", str(tmp_path))
    assert "; a link too fast to be measured, latency 50 ms one way" in text
    assert "streams" not in text
    text = output(capsys, "--run", str(tmp_path), "--bandwidth", "900Mbit")
    assert "; 900 Mbit/s, latency 50 ms one way" in text
    assert "TCP streams" in text


def test_runs_without_conditions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for workers, told in {
        0: "has measured no links: give a",
        3: "the records of 3 workers",
    }.items():
        folder = tmp_path / f"{workers}-workers"
        write_run(folder, step_records(100), round_records(100, workers=workers) or ((), ()))
        assert main(["--config", "debug", "--run", str(folder)]) == 2
        assert told in capsys.readouterr().err


def test_a_step_that_no_gpu_is_fast_enough_for(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--config", "1b", *LINK, "--step-time"]
    assert main([*link, "0.5s"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"warning: --step-time 0.5s: with 1 rank a worker, a GPU would compute [34],\d\d\d "
        r"TFLOP/s, and the peak of a B200 is 2,250: give a longer time than 0\.\d\ds, or at "
        r"least 2 ranks with --parallel.fsdp",
        warning,
    )
    for words in (["0.5s", "--parallel.fsdp", "2"], ["0.9s"], ["0.5s", "--run.device", "cpu"]):
        assert main([*link, *words]) == 0
        assert capsys.readouterr().err == "", words


MISTAKES = [
    (["--config", "1b", *LINK], r"--step-time, such as 500ms; or --run"),
    (["--config", "1b", "--step-time", "0.5s"], r"give --bandwidth, such as 200Mbit/s"),
    (plan("--step-time", "0s"), r"step times above 0"),
    (plan("--utilization", "95"), r"--utilization 95: give a share between"),
    (plan("--diloco.workers", "1"), r"there are no links"),
    (plan("--bandwith", "1Gbit"), r"bandwith = \"1Gbit\": unknown key"),
    (plan("--price.per_gb", "-1"), r"price.per_gb = \"-1\": expected a number >= 0"),
    (plan("--price.per_million_reads", "few"), r"reads = \"few\": expected a number$"),
    (plan("--price-per-gb", "0.09"), r"price-per-gb = .*: unknown key; did you mean price.per_gb"),
    (KNOWN, r"give a model with --config"),
    (["--run", "nothere"], r"--run nothere: there is no run in nothere: it does not exist; give "),
    (["--run", "."], r"--run \.: there is no run in \.: it has no config\.toml; give the folder"),
    (["--config", "1b", "--run", "nothere"], r"--run nothere: there is no run in nothere: "),
    (["--presets", "--diloco.workers", "4"], r"--diloco\.workers: --presets takes no settings"),
    (["--presets", "--write", "x.toml"], r"--write is not used with --presets: remove it"),
    (["--table", "--bandwidth", "1Gbit"], r"--bandwidth is not used with --table: remove it"),
    (plan("--gpus", "4"), r"--gpus is only used with --presets: remove it"),
    (["--table", "--gpu", "4"], r"--gpu: --table takes no settings"),
    (plan("--write", "/dev/null/plan.toml"), r"File exists: give the path of a new file"),
    (plan("--training.global_batch_size", "none", "--write", "x.toml"), r"cannot be written"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_mistakes_name_the_remedy(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error, re.S), error
    assert not list(tmp_path.iterdir())


def test_units_that_people_write() -> None:
    for text, bits in {"2 Gbit/s": 2e9, "2gbps": 2e9, "2Gb/s": 2e9, ".5Gbit": 0.5e9}.items():
        assert parse_bandwidth(text) == pytest.approx(bits)
    for text in ("25MB/s", "25 Mbytes"):
        assert parse_bandwidth(text) == pytest.approx(200e6)
    assert parse_duration("250 us") == pytest.approx(250e-6)


@given(st.floats(1e3, 1e13), st.floats(1e-6, 999.0))
def test_formatted_values_come_back(rate: float, seconds: float) -> None:
    assert parse_bandwidth(quantity(rate, "bit/s")) == pytest.approx(rate, rel=1e-3)
    assert parse_bandwidth(quantity(rate, "B/s")) / 8 == pytest.approx(rate, rel=1e-3)
    assert parse_duration(quantity(seconds, "s")) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("parse", "texts", "remedy"),
    [
        (parse_bandwidth, "2;2Gfoo;Gbit;;-2Gbit;2 Gbit per hour", "200Mbit"),
        (
            parse_duration,
            "30;0.5;30mbit;ms;;-30ms;-1",
            "at least 0 with a unit, as in 30ms",
        ),
    ],
)
def test_unclear_values_are_refused(parse: Callable[[str], float], texts: str, remedy: str) -> None:
    for text in texts.split(";"):
        with pytest.raises(ArgumentTypeError, match=f'"{text}".*{remedy}'):
            parse(text)
