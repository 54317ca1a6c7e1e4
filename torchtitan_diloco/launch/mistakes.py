"""What a user got wrong outside the config."""


class LaunchError(ValueError):
    """A run that cannot be started as asked; the text names the value, the key and the remedy."""
