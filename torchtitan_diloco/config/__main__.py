"""Update the tables of docs/configuration.md: .venv/bin/python -m torchtitan_diloco.config"""

from torchtitan_diloco.config.reference import markdown
from torchtitan_diloco.utils import REPOSITORY

page = REPOSITORY / "docs" / "configuration.md"
page.write_text(markdown(page.read_text(encoding="utf-8")), encoding="utf-8")
