"""`.venv/bin/python -m torchtitan_diloco COMMAND`, the same as `torchtitan-diloco COMMAND`."""

from torchtitan_diloco.cli import main

if __name__ == "__main__":
    main()
