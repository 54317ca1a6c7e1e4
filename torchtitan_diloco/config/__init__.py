"""Configuration of a run.

Types and ranges of settings are checked in diloco/fields.py, contradictions in checks.py and, for
[diloco], in diloco/config.py. Settings that depend on the data or on the number of processes are
checked where these are known: components/run_plan.py and distributed/world.py.
"""

from torchtitan_diloco.config.loader import (
    ConfigError,
    from_command_line,
    load_config,
    parse_config,
    to_toml,
)
from torchtitan_diloco.config.schema import Config

__all__ = ["Config", "ConfigError", "from_command_line", "load_config", "parse_config", "to_toml"]
