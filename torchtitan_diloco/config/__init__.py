"""Configuration of a run.

The type and range of a setting are at its field in schema.py; for [diloco] and [islands] in
diloco/config.py and islands/config.py, with their own contradictions. All others are in checks.py.
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
