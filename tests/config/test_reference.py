"""The reference of the settings is complete and up to date."""

from tests.conftest import REPOSITORY
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.reference import help_text, markdown, sections
from torchtitan_diloco.config.schema import flat_settings


def test_every_section_and_setting_is_documented() -> None:
    rows = [row for _, _, rows in sections() for row in rows]
    assert [key for key, *_ in rows] == list(flat_settings(Config()))
    assert all(text for _, _, _, text in rows)
    assert not [name for name, text, _ in sections() if not text or text.startswith(name)]


def test_help_lists_every_key_with_its_values_and_default() -> None:
    text = help_text(["debug"])
    assert all(f"--{key}  (" in text for key in flat_settings(Config()))
    assert "--optimizer.weight_decay  (number >= 0 or 1/steps; default: 0.1)" in text
    assert "--profiling.ranks  (list of integers >= 0; default: [0])" in text


def test_configuration_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown(page), "run python -m torchtitan_diloco.config"
