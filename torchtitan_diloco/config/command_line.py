"""The words after `./run_train.sh` -> Config."""

from torchtitan_diloco.config.loader import COMMAND_LINE, load_config
from torchtitan_diloco.config.mistakes import ConfigError, Mistake
from torchtitan_diloco.config.reference import help_text
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.config.toml_writer import to_toml

DEFAULT_CONFIG = "debug"


def from_command_line(words: list[str]) -> Config | None:
    """The config the words ask for, or None when they asked for `--help` or `--print-config`, which is then printed."""
    flags = {"--help", "-h", "--print-config"}
    asked = [word for word in words if word in flags]
    if "--help" in asked or "-h" in asked:
        print(help_text())
        return None
    settings = _pair_up([word for word in words if word not in flags])
    config = load_config(settings.pop("config", DEFAULT_CONFIG), settings)
    if asked:
        print(to_toml(config), end="")
        return None
    return config


def _pair_up(words: list[str]) -> dict[str, str]:
    """`--key value` and `--key=value` as a mapping; a later value of the same key wins."""
    settings: dict[str, str] = {}
    mistakes: list[Mistake] = []
    remaining = iter(words)
    for word in remaining:
        key, equals, value = word.partition("=")
        if not key.startswith("--") or key == "--":
            mistakes.append(
                Mistake(COMMAND_LINE, word, None, "settings look like --section.key value")
            )
            continue
        if not equals:
            following = next(remaining, None)
            if following is None or (following.startswith("--") and not _is_number(following)):
                mistakes.append(Mistake(COMMAND_LINE, key, None, f"needs a value: {key} VALUE"))
                if following is None:
                    break
                remaining = iter([following, *remaining])
                continue
            value = following
        settings[key.removeprefix("--")] = value
    if mistakes:
        raise ConfigError(mistakes)
    return settings


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
