"""Configuration of a run.

Types and ranges are in schema.py, checks across settings in checks.py; for [diloco] and [islands]
both are in diloco/config.py and islands/config.py. Checks that need the data or the number of
processes are in components/run_plan.py and distributed/world.py.
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
