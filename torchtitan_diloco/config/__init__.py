from torchtitan_diloco.config.command_line import from_command_line
from torchtitan_diloco.config.loader import load_config
from torchtitan_diloco.config.mistakes import ConfigError
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.config.toml_writer import to_toml

__all__ = ["Config", "ConfigError", "from_command_line", "load_config", "to_toml"]
