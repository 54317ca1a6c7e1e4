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
    assert "  --profiling.ranks  (list of integers >= 0; default: [0])\n" in help_text(["debug"])


def test_configuration_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown(page), "run python -m torchtitan_diloco.config"
