"""Configuration of a run.

Types and ranges of settings are at their fields in schema.py, and contradictions in checks.py.
Those of [diloco] and [islands] are all in diloco/config.py and islands/config.py.
Settings that depend on the data or on the number of processes are checked where these are known:
components/run_plan.py and distributed/world.py.
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
