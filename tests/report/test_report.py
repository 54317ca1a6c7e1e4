"""What the command says about runs: finished, running, old, taken up again, and about what is no run."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import FRAGMENTS, PARAMETERS, round_records, step_records, write_run
from torchtitan_diloco.pictures.scene import Text
from torchtitan_diloco.planner.prediction import all_reduce_bytes
from torchtitan_diloco.report.__main__ import main
from torchtitan_diloco.report.facts import (
    data_parallel_bytes,
    hidden_percent,
    link_facts,
    sent_bytes_per_worker,
    worker_facts,
)
from torchtitan_diloco.report.figures import figures
from torchtitan_diloco.report.markdown import markdown
from torchtitan_diloco.report.page import html_page
from torchtitan_diloco.report.run_records import Run, open_runs
from torchtitan_diloco.report.tables import differences_table, facts_table
from torchtitan_diloco.report.words import ABSENT, duration, quantity, sparkline


def opened(folder: Path) -> Run:
    (run,) = open_runs([folder])
    return run


def facts(run: Run) -> dict[str, tuple[str, str]]:
    return {name.text: (cell.text, cell.note) for name, cell in facts_table([run]).rows}


def titles(run: Run) -> list[str]:
    return [figure.scene.title for figure in figures([run])]


def lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


class Checker(HTMLParser):
    """Tags are closed in their order; nothing is loaded and nothing is run."""

    ALONE = {"meta", "rect", "polyline", "circle"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object")
        for name, value in attrs:
            assert name not in ("src", "href", "srcset", "action"), value
            assert not name.startswith("on"), value
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.ALONE:
            super().handle_startendtag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.ALONE:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_of_a_run(streaming: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(streaming)]) == 0
    page = streaming / "report.html"
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert not re.search(r"@import|url\(", text)
    assert 'a <tale> of "two" runs & more; 3 workers, Streaming DiLoCo' in checker.text
    assert "<tale>" not in text
    assert main([str(streaming / "metrics.jsonl"), "--out", str(streaming / "again.html")]) == 0
    assert (streaming / "again.html").read_text() == text, "the same records, the same page"


def test_the_timeline_alone_is_a_picture(streaming: Path, tmp_path: Path) -> None:
    for name in ("timeline.svg", "timeline.png"):
        assert main([str(streaming), "--timeline", str(tmp_path / name)]) == 0
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_timeline_that_cannot_be_drawn(
    streaming: Path, data_parallel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = str(tmp_path / "timeline.svg")
    for words, told in (
        ([str(streaming), "--timeline", str(tmp_path / "timeline.jpg")], "a picture ends in"),
        (
            [str(streaming), str(data_parallel), "--timeline", picture],
            "of one run, and 2 are given",
        ),
        ([str(data_parallel), "--timeline", picture], "has no exchanges to draw"),
    ):
        assert main(words) == 2
        assert told in capsys.readouterr().err


def test_pictures_of_a_run(streaming: Path) -> None:
    assert titles(opened(streaming)) == [
        "Loss over tokens",
        "Loss over time",
        "Bytes sent by each worker",
        "Bandwidth",
        "Where the time went",
        "The last 8 exchanges",
        "The last exchange",
        "Cosine of a worker's update to the mean",
        "Drift of the workers",
    ]


def test_facts_of_a_run(streaming: Path) -> None:
    run = opened(streaming)
    told = facts(run)
    assert told["tokens, all workers"] == ("9,830,400", "600 steps")
    assert told["time"][0] == "0:05:00"
    assert told["sent by each worker"][0] == quantity(60 * 1.5e6, "B") == "90.0 MB"
    assert told["utilisation"] == ("97.1 %", "measured; 95.0 % predicted")
    assert told["communication hidden"][0] == "95.8 %"
    assert hidden_percent(run) == pytest.approx(100 * (1 - 0.05 / 1.2))
    assert run.parameters == sum(PARAMETERS)


def test_data_parallelism_is_counted_as_the_trainer_counts_it(streaming: Path) -> None:
    run = opened(streaming)
    expected = 600 * all_reduce_bytes(sum(PARAMETERS), 3)
    assert data_parallel_bytes(run) == pytest.approx(expected)
    sent = sent_bytes_per_worker(run)
    assert sent is not None
    assert f"{expected / sent:,.1f} times" in facts(run)["data parallelism would send"][1]


def test_the_slow_worker_and_the_slow_link_are_named(streaming: Path) -> None:
    run = opened(streaming)
    workers = worker_facts(run)
    assert workers[0].worker == 2, "it is made to be the last"
    assert workers[0].last_in > 0.8 * len(run.rounds)
    assert sum(fact.last_in for fact in workers) == len(run.rounds) == workers[0].rounds
    links = link_facts(run)
    assert len(links) == 6
    assert (links[0].sender, links[0].receiver) == (2, 0)
    assert links[0].median_bits_per_second < 0.3 * links[1].median_bits_per_second
    assert "worker 2 to worker 0" in facts(run)["slowest link"][1]
    assert "worker 2" in facts(run)["last to arrive"][0]


def test_a_run_that_is_going_on(running: Path) -> None:
    run = opened(running)
    assert run.unreadable == 0, "a last line that is being written is no damage"
    assert run.last_step == 400
    assert facts(run)["utilisation"] == (
        ABSENT,
        "not recorded: the run has not ended, or is an old one",
    )


def test_a_run_taken_up_again_after_its_end_has_not_ended(streaming: Path) -> None:
    with (streaming / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 610, "train/tokens_global": 1}) + "\n")
    assert opened(streaming).summary == {}


def test_a_run_of_data_parallelism_has_no_rounds(data_parallel: Path) -> None:
    run = opened(data_parallel)
    assert titles(run) == ["Loss over tokens", "Loss over time", "Where the time went"]
    assert "No exchange of fragments was recorded" in html_page([run])
    assert "last to arrive" not in facts(run)


def test_an_old_run_lacks_keys(tmp_path: Path) -> None:
    def old(record: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value
            for key, value in record.items()
            if not key.startswith(("time/share", "diloco/bandwidth"))
        }

    run = opened(
        write_run(
            tmp_path / "old",
            [old(record) for record in step_records(300)],
            "[diloco]\nworkers = 2\n",
        )
    )
    assert titles(run) == [
        "Loss over tokens",
        "Loss over time",
        "Bytes sent by each worker",
        "Bandwidth",
    ]
    assert facts(run)["exposed communication"][0] == f"{100 * 30 * 0.11 / 150:.1f} %"


def test_a_run_without_a_configuration_is_read_from_its_records(tmp_path: Path) -> None:
    run = opened(
        write_run(tmp_path / "bare", step_records(300, workers=4) + round_records(300, workers=4))
    )
    assert run.workers == 4
    assert "no config.toml" in html_page([run])


def test_values_that_are_no_finite_numbers(tmp_path: Path) -> None:
    records = step_records(200)
    for record, value in zip(records, ("nan", "inf", None, "-inf"), strict=False):
        record["train/loss_nats_per_token_global"] = value
        record["diloco/bandwidth_used_mbit_per_second_mean_over_workers"] = value
    run = opened(write_run(tmp_path / "diverged", records, "[diloco]\nworkers = 2\n"))
    assert len(run.curve("train/loss_nats_per_token_global")) == 19
    for page in (html_page([run]), markdown([run])):
        assert "nan" not in re.sub(r"<style>.*?</style>", "", page)


def test_records_are_put_in_the_order_of_the_steps(streaming: Path, tmp_path: Path) -> None:
    """A logged step is written after a validation of a later one; so may be what a run wrote that was taken up again."""
    aside = tmp_path / "shuffled"
    aside.mkdir()
    steps = [line for line in lines(streaming) if '"kind"' not in line]
    rest = [line for line in lines(streaming) if '"kind"' in line]
    (aside / "metrics.jsonl").write_text("\n".join([*reversed(steps), *rest]) + "\n")
    one, other = opened(streaming), opened(aside)
    assert one.steps == other.steps
    assert [record["step"] for record in one.steps] == sorted(
        {json.loads(line)["step"] for line in steps}
    )


def test_a_validation_lies_where_its_step_does(streaming: Path) -> None:
    run = opened(streaming)
    assert run.tokens_at(100) == 100 * 16_384
    assert run.seconds_at(105) == pytest.approx(52.5)
    assert run.seconds_at(0) == 0
    assert run.seconds_at(10_000) == 300


def test_runs_side_by_side(streaming: Path, running: Path, data_parallel: Path) -> None:
    runs = open_runs([streaming, running, data_parallel])
    assert facts_table(runs).head == ["", "streaming", "running", "data-parallel"]
    differences = {
        row[0].text: [cell.text for cell in row[1:]] for row in differences_table(runs).rows
    }
    assert differences == {
        "diloco.method": ['"streaming"', '"streaming"', '"none"'],
        "diloco.quantization.codec": ['"fp4_e3m0"', '"int8"', '"fp4_e3m0"'],
    }
    checker = Checker()
    checker.feed(html_page(runs))
    assert checker.open == []
    assert "3 runs side by side" in checker.text
    named = {
        figure.scene.title: [shape.text for shape in figure.scene.shapes if isinstance(shape, Text)]
        for figure in figures(runs)
    }
    for title in ("Loss over tokens", "Bytes sent by each worker", "Drift of the workers"):
        assert {"streaming", "running"} <= set(named[title]), (
            "also where one run of several has something to show"
        )
    alone = {figure.scene.title: figure for figure in figures(runs[1:])}["Drift of the workers"]
    assert "running" in [shape.text for shape in alone.scene.shapes if isinstance(shape, Text)]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / place / "run", step_records(20)) for place in ("here", "there")]
    assert [run.name for run in open_runs(folders)] == ["here/run", "there/run"]
    assert [run.name for run in open_runs([folders[0], folders[0]])] == ["run (1)", "run (2)"]


def test_text_for_a_terminal(
    streaming: Path, running: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(streaming), str(running), "--format", "md"]) == 0
    text = capsys.readouterr().out
    assert not (streaming / "report.html").exists()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(line) for line in block.splitlines()}) == 1, (
            "columns stand below each other"
        )
        assert len({line.replace(r"\|", "").count("|") for line in block.splitlines()}) == 1
    assert "| utilisation" in text
    assert '| diloco.quantization.codec | "fp4\\_e3m0"' in text
    assert (
        main([str(streaming), str(running), "--format", "md", "--out", str(tmp_path / "report.md")])
        == 0
    )
    assert (tmp_path / "report.md").read_text() == text


def nothing(_: Path) -> None:
    pass


def only_a_folder(path: Path) -> None:
    path.mkdir()


def no_records(path: Path) -> None:
    path.mkdir()
    (path / "metrics.jsonl").write_text("this is\nno record\n")


def binary(path: Path) -> None:
    path.mkdir()
    (path / "metrics.jsonl").write_bytes(bytes(range(256)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nothing, "is no folder"),
        (only_a_folder, "has no metrics.jsonl"),
        (no_records, "no line"),
        (binary, "no line"),
    ],
)
def test_what_is_no_run_is_told_in_a_line(
    make: Callable[[Path], None], reason: str, streaming: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = streaming.parent / "streming"
    make(path)
    assert main([str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: RUN = {path}")
    assert reason in message
    assert message.count("\n") == 1
    if "no folder" in reason:
        assert f"nearest: {streaming}" in message


def test_a_report_that_cannot_be_written_is_told_in_a_line(
    streaming: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "nowhere" / "report.html"
    assert main([str(streaming), "--out", str(target)]) == 2
    assert (
        f"error: --out {target} cannot be written (No such file or directory)"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": "one"}',
        "[1, 2]",
        "null",
        '{"kind": "round", "step": 5}',
        '{"kind": "round", "step": 6, "workers": [null, 3]}',
        '{"kind": "something new", "step": 7}',
    ],
)
def test_a_line_that_says_little_is_no_obstacle(damage: str, streaming: Path) -> None:
    content = lines(streaming)
    (streaming / "metrics.jsonl").write_text(
        "\n".join([*content[:10], damage, *content[10:], damage]) + "\n"
    )
    run = opened(streaming)
    html_page([run])
    markdown([run])
    assert run.last_step == 600


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    assert "has not logged a step yet" in html_page([opened(folder)])


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    bad = '</pre><script>alert("1")</script>'
    rounds = round_records(100)
    for record in rounds:
        record["fragment_name"] = bad
    settings = f"[run]\ndescription = {json.dumps(bad)}\n\n[diloco]\nworkers = 2\n"
    folder = write_run(tmp_path / "<b>run|*", step_records(100) + rounds, settings)
    checker = Checker()
    checker.feed(html_page([opened(folder)]))
    assert checker.open == []
    assert "".join(checker.text).count(bad) > 3
    assert r"\<b\>run\|\*" in markdown([opened(folder)])


def test_words() -> None:
    assert [quantity(value, "B") for value in (None, 0, 12, 1234, 56_700_000, 890e9)] == [
        ABSENT,
        "0 B",
        "12 B",
        "1.23 kB",
        "56.7 MB",
        "890 GB",
    ]
    assert duration(90_061) == "1d 1:01:01"
    assert sparkline([1, 2, 3], 3) == "▁▅█"
    assert sparkline([1.0, float("nan")]) == ""


def test_the_fixtures_are_of_the_documented_format() -> None:
    """docs/report.md lists every key that the synthetic records have."""
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    record = round_records(100)[0]
    documented = set(re.findall(r"`([\w/]+)`", page))
    used = {*record, *record["workers"][0], *step_records(100)[0], *step_records(100)[-1]}
    assert used <= documented, used - documented
    assert len(FRAGMENTS) == len(PARAMETERS)
