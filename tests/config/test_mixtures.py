"""Mixtures and phases of the data in a configuration."""

import pytest

from torchtitan_diloco.config import (
    ConfigError,
    from_command_line,
    load_config,
    parse_config,
    to_toml,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.mixture": "a=-1 b=1"}, 'data.mixture: the weight of "a" is -1.0'),
        ({"data.mixture": "a=nan"}, 'the weight of "a" is "nan": expected a number'),
        ({"data.mixture": "a=0 b=0"}, "all weights are 0"),
        ({"data.mixture": "a"}, "give NAME=VALUE pairs"),
        ({"data.mixture": "my web=1"}, "my: give NAME=VALUE pairs, such as data/web=0.7"),
        ({"data.mixture": "my web=1"}, "quote a name with spaces once more, such as "),
        ({"data.mixture": "it's=1"}, ": no closing quotation: write each quote and each"),
        ({"data.mixture": "a=1 b=1 a=2"}, "a is given several times, as 1 and 2: give each name"),
        ({"data.mixture": "a=1 b=x"}, 'the weight of "b" is "x": expected a number'),
        ({"data.mixture": "{a = 1, b = true}"}, 'the weight of "b" is true: expected a number'),
        ({"data.mixture": "a=1 a=2"}, "a is given several times, as 1 and 2: give each name once"),
        ({"data.mixture": "{a = nan}"}, 'the weight of "a" is NaN: expected a number, which nan'),
        ({"data.mixture": "3"}, "expected weights by name, such as {"),
        ({"data.phases": "[3]"}, "data.phases[0] = 3: expected a table with start and mixture"),
        (
            {"data.phases": "[{start = 0.5, mixtrue = {a = 1}}]"},
            "data.phases[0].mixtrue: unknown key; did you mean mixture?",
        ),
        (
            {"data.phases": "[{start = 0.5, mixture = {a = 1}, xyz = 3}]"},
            "data.phases[0].xyz: unknown key; it has start and mixture",
        ),
        ({"data.phases": "[{start = 0.5}]"}, "data.phases[0] has no mixture: give start and"),
        (
            {"data.phases": "[{start = 'x', mixture = {a = 1}}]"},
            'data.phases[0].start = "x": expected a number',
        ),
        ({"data.phases": "[{start = 1.2, mixture = {a = 1}}]"}, "a phase starts at 1.2:"),
        ({"data.phases": "[{start = 0.2, mixture = {a = -1}}]"}, 'weight of "a" is -1'),
        ({"data.shard_by": "own", "diloco.workers": "2"}, "needs a corpus with {worker}"),
        ({"data.corpus": "x-{worker}"}, 'only replaced with data.shard_by = "own"'),
        ({"data.validation_corpus": "x-{worker}"}, "all workers validate one text together"),
        ({"data.mixture": "a=1", "data.corpus": "b"}, "data.corpus already sets the corpus"),
    ],
)
def test_bad_mixtures_are_one_line_each(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config("debug", changes)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "words",
    [
        ["my web.jsonl=3", "b=1"],
        ["'my web.jsonl'=3", "b=1"],
        ["'my web.jsonl'=3 b=1"],
        ["{'my web.jsonl'", "=", "3,", "b=1}"],
        ['my" web.jsonl"=3', "b=1"],
    ],
)
def test_names_in_a_mixture_may_have_spaces(words: list[str]) -> None:
    """Quotes of the shell are enough if there are several pairs."""
    config = from_command_line(["--config", "debug", "--data.mixture", *words])
    assert config.data.mixture == {"my web.jsonl": 3.0, "b": 1.0}


def test_a_mixture_survives_the_saved_configuration() -> None:
    phases = '[{start = 0.8, mixture = {"g.x" = 1.0}}]'
    config = load_config("debug", {"data.mixture": "data/web.x=0.7 b=0.3", "data.phases": phases})
    assert config.data.corpora == ["data/web.x", "b", "g.x"]
    assert parse_config(to_toml(config), "saved") == config
