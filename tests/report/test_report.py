import json
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from shutil import copytree

import msgspec
import pytest

from tests.report.synthetic import (
    FRAGMENTS,
    phase_records,
    round_records,
    step_records,
    write_run,
)
from tests.test_trainer import LOSS
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.metrics import BASELINE, baseline_bytes
from torchtitan_diloco.config import load_config, to_toml
from torchtitan_diloco.report.charts import (
    SERIES,
)
from torchtitan_diloco.report.figures import Figure, figures, latest
from torchtitan_diloco.report.page import describe, detail_tables, facts_table, html_page, main
from torchtitan_diloco.report.run_records import Run, open_runs


def opened(folder: Path) -> Run:
    (run,) = open_runs([folder])
    return run


def facts(run: Run) -> dict[str, tuple[str, str]]:
    return {name.text: (cell.text, cell.note) for name, cell in facts_table([run]).rows}


def by_title(*runs: Run) -> dict[str, Figure]:
    return {figure.title: figure for figure in figures(runs)}


def shown_text(page: str) -> str:
    """Return the text of a page, on which nothing may be loaded or run."""
    assert not re.search(r"@import|url\((?!#)", page)
    assert not re.search(r"<(script|link|iframe|object)\b", page)
    assert not re.search(r"<[^>]* (href|srcset|action|on\w+)=", page)
    assert not re.search(r' src="(?!data:image/svg\+xml;base64,)', page)
    ids = re.findall(r'<[^>]* id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    return unescape(re.sub(r"<[^>]*>", "\n", page))


def test_page_of_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    streaming = runs / "streaming"
    for page, words in (("report.html", []), ("again.html", ["--out", f"{streaming}/again.html"])):
        assert main([str(streaming), *words]) == 0
        assert capsys.readouterr().out == f"{streaming / page}\n"
    text = (streaming / "report.html").read_text()
    assert (streaming / "again.html").read_text() == text, "the same records, the same page"
    shown = shown_text(text).splitlines()
    assert 'a <tale> of "two" runs & more; 3 workers, Streaming DiLoCo' in shown
    assert "<tale>" not in text
    for section in ("Workers", "Links, slowest first", "All settings"):
        assert section in shown
    assert "worker 2: transfer 800.0 ms" in text, "a tooltip"


def test_facts_and_figures_of_a_run(runs: Path) -> None:
    run = opened(runs / "streaming")
    told = facts(run)
    assert (
        told.items()
        >= {
            "tokens": ("9,830,400", "of the run, 600 steps"),
            "time": ("0:05:00", "h:mm:ss, up to the last logged step"),
            "sent by each worker": ("90.0 MB", "counted in the buffers, mean over workers"),
            "hidden": (
                f"{100 * (1 - 0.05 / 1.2):.1f} %",
                "of the exchanges' time, all workers",
            ),
        }.items()
    )
    bar = by_title(run)["Where the time went"].bars["streaming"]
    for fact, part in (("compute share", "compute"), ("exposed communication",) * 2):
        assert told[fact][0] == f"{bar[part]:.1f} %"
    ratio = 600 * baseline_bytes(sum(FRAGMENTS.values()), 3) / (60 * 1.5e6)
    assert f"{ratio:,.1f} times" in told[BASELINE][1]
    _, workers, links = detail_tables([run])
    assert [row[0].text for row in workers.rows] == ["worker 2", "worker 0", "worker 1"]
    assert workers.rows[0][1].text == "57 of 57"
    assert len(links.rows) == 6
    assert [cell.text for cell in links.rows[0]] == ["worker 2 to worker 0", "40.0 Mbit/s", "57"]

    found = by_title(run)
    assert list(found) == [
        "Loss over tokens",
        "Loss over time",
        "Loss by corpus",
        "Learning rate",
        "Bytes sent by each worker",
        "Where the time went",
        "The last exchanges",
        "Cosine of a worker's update to the mean",
        "Drift of the workers",
    ]
    assert [key.name for key in found["Loss over tokens"].legend] == ["training", "shared model"]
    assert [key.name[:2] for key in found["Drift of the workers"].legend] == ["0:", "1:", "2:"]
    assert sum(found["Where the time went"].bars["streaming"].values()) == pytest.approx(100)


def test_the_description_of_a_run_names_its_text(tmp_path: Path) -> None:
    chosen = load_config("demo", {"data.corpus": "docs/*.md"})
    run = opened(write_run(tmp_path, step_records(20), ((), ()), to_toml(chosen)))
    assert "; text docs/*.md, tokenizer bytes; 2 workers, Streaming DiLoCo" in describe(run)
    assert "library" not in describe(run)
    mixed = load_config("demo", {"data.corpus": "", "data.mixture": "docs/*.md=1 README.md=3"})
    other = opened(write_run(tmp_path / "mixed", step_records(20), ((), ()), to_toml(mixed)))
    assert "; text docs/*.md, README.md, tokenizer bytes; 2 workers" in describe(other)


def test_verdicts_have_lanes_and_evidence(runs: Path, tmp_path: Path) -> None:
    """Both are over before the run is; the later worker waits for nobody."""
    folder = tmp_path / "run"
    copytree(runs / "streaming", folder)
    about = {"kind": "verdict", "since": 119, "evidence": "0.12 s a step"}
    slow = about | {"what": "slow compute", "culprit": "worker 1"}
    link = about | {"what": "slow link", "culprit": "worker 0 -> worker 2"}
    times = [(slow, 60, False), (link, 100, False), (slow, 90, True), (link, 150, True)]
    with (folder / "worker-0/metrics.jsonl").open("a") as file:
        for one, at, over in times:
            record = one | {"step": 2 * at, "time": 1e9 + at, "over": over}
            file.write(json.dumps(record) + "\n")
    run = opened(folder)
    assert [(one.what, end - one.time) for one, end in run.verdicts] == [
        ("slow compute", 30.0),
        ("slow link", 50.0),
    ]
    (found,) = [table for table in detail_tables([run]) if table.heading == "Verdicts"]
    assert [row[0].text for row in found.rows] == [
        "worker 1: slow compute",
        "worker 0 -> worker 2: slow link",
    ]
    assert [row[3].text for row in found.rows] == ["0.12 s a step"] * 2
    lanes = by_title(run)["Verdicts of run"].lanes
    assert lanes is not None
    (start, length, _), *_ = lanes.rows[0][1]
    assert (start, length) == pytest.approx((20.0, 10.0))
    workers = [replace(worker, starts=()) for worker in run.workers]
    without_starts = by_title(replace(run, workers=workers))["Verdicts of run"].lanes
    assert without_starts is not None
    assert without_starts.rows[0][1][0][0] == 0.0, "from the first verdict on"
    assert "0.12 s a step" in shown_text(html_page([run]))


def marked(figure: Figure) -> list[float]:
    """Return where vertical lines cross a figure, from left to right."""
    lines = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) [\d.]+ \n"', figure.chart)
    return sorted(float(start) for start, end in lines if start == end)


def test_phases_of_the_data_are_marked_and_listed(runs: Path) -> None:
    run = opened(runs / "streaming")
    table = detail_tables([run])[0]
    assert table.heading == "Mixtures and phases"
    shown = [[name.text, step.text, step.note, mix.text] for name, step, mix in table.rows]
    assert shown[0] == [
        "data.mixture",
        "0",
        "0 % of the run",
        "70\xa0%\xa0data/web, 30\xa0%\xa0data/code",
    ]
    assert [row[:3] for row in shown[1:]] == [
        ["phase 1", "420", "70 % of the run"],
        ["phase 2", "480", "80 % of the run"],
        ["phase 3", "594", "99 % of the run"],
    ]
    found = by_title(run)
    assert [key.name for key in found["Loss by corpus"].legend] == ["data/web", "data/code"]
    over_steps = "Cosine of a worker's update to the mean", "Drift of the workers"
    over_tokens = "Loss over tokens", "Loss over time", "Loss by corpus", "Learning rate"
    for title in (*over_tokens, *over_steps):
        first, second, third = marked(found[title])
        assert (third - first) / (second - first) == pytest.approx(174 / 60, rel=1e-3), title
        assert found[title].caption.endswith("Vertical line: a mixture of corpora begins.")
        names = re.findall(r">(phase \d)<", found[title].chart)
        assert names == ["phase 1", "phase 3"], "that of the second would meet the first"
    assert marked(found["Bytes sent by each worker"]) == []


def test_phases_of_several_runs_have_their_colors(tmp_path: Path) -> None:
    """A changed mixture of a resumed run is no phase. An island writes its mixture again and again,
    and a run of one corpus none."""
    phases = phase_records([80], steps=100)
    changed = msgspec.structs.replace(phases[0], step=40, mixture="50 % a, 50 % b")
    again = msgspec.structs.replace(phases[0], step=20)
    lists = {"plain": [], "phased": phases, "changed": [phases[0], again, changed, phases[1]]}
    folders = [
        write_run(tmp_path / name, step_records(100), phases=own) for name, own in lists.items()
    ]
    together = open_runs(folders)
    assert [[name for name, _ in run.mixtures] for run in together] == [
        [],
        ["data.mixture", "phase 1"],
        ["data.mixture", "changed", "phase 1"],
    ]
    rate = by_title(*together)["Learning rate"]
    assert len(marked(rate)) == 3
    assert ">phase" not in rate.chart
    assert rate.chart.count(f"stroke: {SERIES[2]}; stroke-linecap") == 2
    headings = [table.heading for table in detail_tables(together)]
    assert headings == [f"Mixtures and phases, {name}" for name in ("phased", "changed")]


def test_runs_that_lack_something(runs: Path, tmp_path: Path) -> None:
    run = opened(runs / "running")
    assert run.last_step == 400
    assert run.workers[0].unreadable == 0, "an incomplete last line is no error"
    measured = by_title(run)["Drift of the workers"]
    assert len(measured.legend) == 3, "few rounds were measured"
    assert "nan" not in measured.chart

    control = opened(runs / "data-parallel")
    losses = ["Loss over tokens", "Loss over time"]
    assert list(by_title(control)) == [*losses, "Learning rate", "Where the time went"]
    assert "No exchange was recorded" in html_page([control])
    sent, how = facts(control)["sent by each worker"]
    baseline, ratio = facts(control)[BASELINE]
    assert how == "computed: fp32 gradients, every step"
    assert ratio == "0.5 times as much"
    assert float(sent.split()[0]) == pytest.approx(2 * float(baseline.split()[0]), abs=0.15)
    assert detail_tables([control]) == []

    new = opened(write_run(tmp_path / "new", []))
    assert "has not logged a step yet" in html_page([new])
    assert "no readable config.toml" in html_page([new])


def test_a_first_worker_whose_records_begin_later_does_not_stop_a_report(tmp_path: Path) -> None:
    """Its folder was lost, and it took a copy of a checkpoint from another one."""
    folder = write_run(tmp_path / "run", step_records(200), round_records(200))
    file = folder / "worker-0/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], *lines[11:]]))
    run = opened(folder)
    assert len(run.workers[0].steps) < len(run.source.steps) == 20
    sent = by_title(run)["Bytes sent by each worker"]
    assert [key.name for key in sent.legend] == ["sent", BASELINE]


def test_islands_are_workers_in_other_places(tmp_path: Path) -> None:
    """Two began, and a third one came. They know no arrivals, and each has its own loss."""
    folders = []
    for place, name in enumerate(("oslo", "rome")):
        (rounds,) = round_records(100, workers=1)
        for number, record in enumerate(rounds):
            record.participants = 2 if number < 2 else 3
        settings = f'[diloco]\nworkers = 9\n[islands]\nname = "{name}"\nbegin = 2\n'
        steps = step_records(100, seed=place)
        folders.append(write_run(tmp_path / "all" / name, steps, [rounds], settings))
    island = opened(folders[0])
    both = opened(tmp_path / "all")
    assert (describe(island), describe(both)) == ("1 of 3 islands", "2 of 3 islands")
    expected = 100 * baseline_bytes(sum(FRAGMENTS.values()), 3)
    for run in (island, both):
        assert facts(run)["sent by each worker"][0] == "15.0 MB"
        assert f"{expected / 15e6:,.1f} times" in facts(run)[BASELINE][1]
        assert "oslo" in facts(run)["training loss"][1]
    rates = [facts(run)["tokens/s"] for run in (island, both)]
    assert rates == [("32,768", "1 of 3 islands, median"), ("65,536", "2 of 3 islands, median")]
    assert "rome: merging" in html_page([both])
    assert facts(island)["hidden"][1].endswith(", own of oslo")
    assert facts(both)["hidden"][1].endswith(", mean of 2 islands")


def test_an_island_without_steps_leaves_the_numbers_of_the_others(tmp_path: Path) -> None:
    """It came first, and was gone before it had logged a step."""
    for name, steps in (("oslo", []), ("rome", step_records(100)), ("york", step_records(100))):
        settings = f'[islands]\nname = "{name}"\n'
        write_run(tmp_path / "all" / name, steps, settings=settings, run="run-1")
    (tmp_path / "all/oslo/worker-0/metrics.jsonl").write_text("")
    run = opened(tmp_path / "all")
    assert (run.last_step, run.parameters) == (100, sum(FRAGMENTS.values()))
    shown = facts(run)
    assert shown["tokens"] == ("1,638,400", "of the run, 100 steps of rome")
    assert "own of rome" in shown["training loss"][1]
    assert shown["tokens/s"][0] == "65,536"
    assert shown["hidden"] == ("95.8 %", "of the exchanges' time, mean of 2 islands")


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        (["", ""], ["run-1", "run-2"]),
        (2 * ['[islands]\nname = "oslo"\n'], ["run-1", "run-2"]),
    ],
)
def test_runs_in_a_folder_are_not_one(tmp_path: Path, settings: list[str], runs: list[str]) -> None:
    folders = [tmp_path / "all" / name for name in ("a", "b")]
    for folder, text, run in zip(folders, settings, runs, strict=True):
        write_run(folder, step_records(100), settings=text, run=run)
    named = f"give one of its runs, or several: {folders[0]}, {folders[1]}$"
    with pytest.raises(UserError, match=named):
        opened(tmp_path / "all")


def test_islands_of_a_run_have_lanes_on_one_clock(tmp_path: Path) -> None:
    """One is away for a while, and a part of it is merged late. Another run has one of its own."""
    folders = []
    for name in ("oslo", "rome", "other"):
        steps = step_records(200)
        (rounds,) = round_records(200, workers=1)
        if name == "rome":
            steps = [one for one in steps if not 60 < one["step"] < 130]
            before, after = (one for one in rounds[:6] if one.fragment == rounds[2].fragment)
            del before.at_seconds["encoded"]
            after.sent_step = before.step - 1
            rounds = [one for one in rounds if not 60 < one.step < 130 or one is after]
            after.at_seconds = {"encoded": 0.0, "applied": 1e9 + 64}
        settings = f'[islands]\nname = "{name}"\n'
        run_id = "run-2" if name == "other" else "run-1"
        folders.append(write_run(tmp_path / "all" / name, steps, [rounds], settings, run=run_id))
    run, other = open_runs(folders)
    assert (len(run.workers), len(other.workers)) == (2, 1)
    (table,) = detail_tables([run])
    rows = {row[0].text: [cell.text for cell in row[1:5]] for row in table.rows}
    start = "09-09 01:46:40"
    assert rows["oslo"] == [start, "never", str(len(run.workers[0].rounds)), "0"]
    assert rows["rome"][0] == start
    assert re.fullmatch(r"09-09 01:47:\d\d for 0:00:\d\d", rows["rome"][1])
    assert rows["rome"][3] == "1"
    lanes = by_title(run)["Islands of run-1"].lanes
    assert lanes is not None
    found = [(name, len(spans) > 1, len(late)) for name, spans, late in lanes.rows]
    assert found == [("oslo", False, 0), ("rome", True, 1)]
    assert "rome: a part was merged late" in html_page([run])
    names = [key.name for key in by_title(run)["Loss over tokens"].legend]
    assert names == ["training, oslo", "training, rome", "shared model"]
    first, second = run.workers
    step = second.steps[0]
    late_one = replace(second, steps=[{**step, "time": 1e9 + 77}])
    assert run.came_after(late_one) == 77 - step["worker/elapsed_seconds"]
    assert run.came_after(first) == 0


PAUSE = 650.0


def test_a_stop_ends_verdicts_and_begins_a_new_timeline(tmp_path: Path) -> None:
    """Two islands are stopped at step 150, and start again later. One of them had been away for the
    last exchange before, and makes up for it. The other one's records are fewer."""
    resumed = 1e9 + 75 + PAUSE
    starts = {"kind": "start", "step": 150, "time": resumed, "workers": 2, "parameters": 1}
    verdict = {"kind": "verdict", "since": 99, "what": "slow compute", "culprit": "oslo"}
    verdict |= {"evidence": "0.12 s a step", "over": False}
    lines = [{**verdict, "step": 100, "time": 1e9 + 50}, starts | {"run": "run-1"}]
    lines.append({**verdict, "step": 190, "time": 1e9 + 95 + PAUSE})
    both = round_records(200)
    for place, (name, rounds) in enumerate(zip(("oslo", "rome"), both, strict=True)):
        steps = step_records(200)
        for record in steps:
            record["time"] = 1e9 + record["step"] / 2 + PAUSE * (record["step"] > 150)
        before = [one for one in rounds if one.step < 150]
        for one in rounds:
            if one.step > 150 or (place and one is before[-1]):
                one.at_seconds = {key: at + PAUSE for key, at in one.at_seconds.items()}
        kept = rounds if place else [one for one in rounds if one is not before[3]]
        folder = tmp_path / "all" / name
        write_run(folder, steps, [kept], f'[islands]\nname = "{name}"\n', run="run-1")
        path = folder / "worker-0/metrics.jsonl"
        records = [*map(json.loads, path.read_text().splitlines()), *lines]
        records.sort(key=lambda record: (record["step"], record is lines[1]))
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = opened(tmp_path / "all")
    ends = [(one.time, end) for one, end in run.verdicts if one.culprit == "oslo"]
    last = 1e9 + 100 + PAUSE
    assert ends == [(1e9 + 50, 1e9 + 75)] * 2 + [(1e9 + 95 + PAUSE, last)] * 2
    shown = [one for exchange in latest(run, 8) for one in exchange if one is not None]
    assert {one.step > 150 for one in shown} == {True, False}
    assert min(one.ended for one in shown) > resumed - 10
    assert "The last exchanges" in by_title(run)
    first = [exchange[1] for exchange in run.exchanges]
    assert first == sorted(first, key=lambda one: one.ended if one else 0)


def test_records_that_are_damaged_hostile_or_not_finite(tmp_path: Path) -> None:
    """One worker came for the last rounds, and one was left out of some."""
    hostile = '</pre><script>alert("1")</script>'
    rounds = round_records(150, workers=3)
    steps = step_records(150)
    del rounds[2][:-3]
    for record in (*rounds[0], *rounds[1]):
        record.fragment_name = hostile
    for record in rounds[1][:2]:
        record.left_out = ["outlier"]
    for step, value in zip(steps, ("nan", "inf", None, "-inf"), strict=False):
        step[LOSS] = value
        step["sync/mbit_per_second"] = value
    steps[-2]["worker/data_seconds"] = "nan"
    settings = f"[run]\ndescription = {json.dumps(hostile)}\n"
    folder = write_run(tmp_path / "<b>run|*", steps, rounds, settings)
    damage = [
        '{"step": "one"}',
        "[1, 2]",
        "null",
        '{"kind": "round", "step": 5}',
        '{"kind": "something new", "step": 7}',
    ]
    path = folder / "worker-1/metrics.jsonl"
    content = path.read_text().splitlines()
    path.write_text("\n".join([*content[:10], *damage, *content[10:], ""]))
    run = opened(folder)
    assert (run.last_step, run.size) == (150, 3)
    assert len(run.curve(LOSS)[0]) == 14, "null is not a value"
    assert [one is None for one in run.exchanges[0]] == [False, False, True]
    page = html_page([run])
    assert "left out 4 line(s) of metrics.jsonl" in page
    assert "worker 1 was left out of 2 recorded round(s), outlier." in page
    assert "worker 0 was left out" not in page
    assert shown_text(page).count("<script>") > 3
    assert "nan" not in page.partition("</style>")[2]


def test_runs_side_by_side(runs: Path, tmp_path: Path) -> None:
    several = open_runs([runs / name for name in ("streaming", "running", "data-parallel")])
    assert facts_table(several).columns == ["", "streaming", "running", "data-parallel"]
    differences = {
        row[0].text: [cell.text for cell in row[1:]] for row in detail_tables(several)[-1].rows
    }
    assert differences == {
        "diloco.method": ['"streaming"', '"streaming"', '"none"'],
        "diloco.quantization.codec": ['"fp4_e3m0"', '"int8"', '"fp4_e3m0"'],
    }
    shown = shown_text(html_page(several)).splitlines()
    assert "3 runs side by side" in shown
    assert "All settings, running" in shown
    found = by_title(*several)
    names = {key.name: key.color for key in found["Loss over tokens"].legend}
    assert names == dict(zip(["streaming", "running", "data-parallel"], SERIES, strict=False))
    assert list(found["Where the time went"].bars) == [run.name for run in several]

    folders = [write_run(tmp_path / place / "run", step_records(20)) for place in ("here", "there")]
    paths = list(map(str, folders))
    assert [run.name for run in open_runs(folders)] == paths, "of the same name"
    assert [run.name for run in open_runs([folders[0]] * 2)] == ["run"], "once"


def test_a_page_is_made_without_torch(runs: Path, tmp_path: Path) -> None:
    """Its import would take longer than all else."""
    program = (
        "import sys; from torchtitan_diloco.report.page import main; "
        "main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    folder = next(path for path in runs.iterdir() if path.is_dir())
    out = tmp_path / "page.html"
    subprocess.run([sys.executable, "-c", program, folder, "--out", out], check=True)
    assert out.exists()


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        ("nowhere", b"", "/nowhere: it does not exist; give the folder of a run, such as outputs/"),
        ("run/worker-0/metrics.jsonl", b"", "it is a file; give the folder of a run, such as"),
        ("run/config.toml", b"", "config.toml: it is a file; give the folder of a run, such as"),
        ("run", None, "it has no worker-0/metrics.jsonl; give the folder"),
        ("run", b"no\nrecord\n", "has no line that is a record of a run"),
        ("run", bytes(range(256)), "has no line that is a record of a run"),
        (
            "run --out nowhere/a.html",
            b'{"step": 1}\n',
            "--out nowhere/a.html: No such file .*: give",
        ),
    ],
)
def test_mistakes_are_reported_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    content: bytes | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run/worker-0").mkdir(parents=True)
    Path("run/config.toml").touch()
    if content is not None:
        Path("run/worker-0/metrics.jsonl").write_bytes(content)
    assert main(words.split()) == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", capsys.readouterr().err)
