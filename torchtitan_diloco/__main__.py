"""`python -m torchtitan_diloco COMMAND ...` is `torchtitan-diloco COMMAND ...`."""

import sys

from torchtitan_diloco.cli import main

sys.exit(main())
