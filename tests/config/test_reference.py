"""The documentation of the settings is generated, complete and up to date."""

import dataclasses

from tests.conftest import REPOSITORY
from torchtitan_diloco.config.fields import field_specs
from torchtitan_diloco.config.reference import field_docs, help_text, markdown, sections
from torchtitan_diloco.config.schema import Config


def test_every_section_and_field_has_a_docstring() -> None:
    names = {name for name, _ in sections()}
    for name, section in sections():
        assert section.__doc__, name
        documented = field_docs(section)
        for field in dataclasses.fields(section):
            if f"{name}.{field.name}" in names:
                continue  # a section of its own, with its own docstring
            assert documented.get(field.name), f"{name}.{field.name} has no docstring"


def test_help_lists_every_key() -> None:
    shown = help_text()
    for spec in field_specs(Config):
        assert f"--{spec.key}  (" in shown


def test_configuration_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown(), "run python -m torchtitan_diloco.config > docs/configuration.md"
