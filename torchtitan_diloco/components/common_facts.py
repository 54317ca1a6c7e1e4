"""Collect what all ranks of a run must have in common: settings, and the code that computes."""

from collections.abc import Sequence

from torch import nn

from torchtitan_diloco.base.user import PACKAGE
from torchtitan_diloco.config.loader import SECRETS
from torchtitan_diloco.config.schema import PRICES, Config, flat_settings
from torchtitan_diloco.diloco.agreement import code_facts, module_facts
from torchtitan_diloco.diloco.config import MAY_DIFFER

OWN_SETTINGS = {
    "run.folder",
    "run.preemption",
    "run.preemption_address",
    "data.cache_folder",
    *PRICES,
    *MAY_DIFFER,
    *SECRETS,
}
"""Settings that may differ between the processes of a run, or that no other rank may see."""
COMPUTES = (
    "components",
    "config",
    "course.py",
    "data",
    "distributed",
    "export",
    "island_course.py",
    "islands",
    "models",
    "store",
    "trainer.py",
)
"""Code that decides what is computed, which all ranks must have in common with that of `diloco`."""


def common_settings(config: Config) -> dict[str, str]:
    """Return the settings that all ranks must have in common."""
    settings = flat_settings(config).items()
    return {key: str(value) for key, value in settings if key not in OWN_SETTINGS}


def common_code(model: nn.Module, imports: Sequence[str]) -> dict[str, str]:
    """Return facts about this package, and about modules of the user. `imports`: `run.imports`."""
    facts = dict[str, str]()
    # FLAVORS may have models of other modules than those of run.imports.
    modules = {type(model).__module__, *imports}
    for name in sorted(modules):
        if not name.startswith("torchtitan_diloco."):
            facts |= module_facts(name)
    return facts | code_facts(*(PACKAGE / name for name in COMPUTES))
