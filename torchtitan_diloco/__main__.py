"""`.venv/bin/python -m torchtitan_diloco COMMAND`, the same as `torchtitan-diloco COMMAND`."""

import sys

from torchtitan_diloco.cli import main

sys.exit(main())
