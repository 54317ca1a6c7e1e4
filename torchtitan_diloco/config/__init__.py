from torchtitan_diloco.config.loader import (
    ConfigError,
    from_command_line,
    load_config,
    parse_config,
    to_toml,
)
from torchtitan_diloco.config.schema import Config

__all__ = ["Config", "ConfigError", "from_command_line", "load_config", "parse_config", "to_toml"]
