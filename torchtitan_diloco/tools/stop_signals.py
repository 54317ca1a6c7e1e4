"""Which signals ask a run to stop: the launcher passes them on, and training listens to them."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
