"""How many TCP streams the link to the server needs."""

from functools import partial

from torchtitan_diloco.diloco.link import BLOCK, measure
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.session import subject_of
from torchtitan_diloco.islands.wire import Wire
from torchtitan_diloco.log import logger


class Probe:
    """A connection with messages to nobody."""

    def __init__(self, join: Join, address: str) -> None:
        self._wire = Wire(join, address, "probe")
        self.wait, self.close = self._wire.wait, self._wire.close
        self._subject = subject_of(join.run, "probe")

    def send(self, size: int) -> None:
        for start in range(0, size, len(BLOCK)):
            self._wire.publish(self._subject, BLOCK[: size - start])
        self._wire.ask()


def streams_to_server(join: Join) -> int:
    """Measure the link to the server, say what was found, and return the streams that it needs."""
    try:
        speed = measure(partial(Probe, join, join.addresses[0]))
    except (OSError, ValueError) as error:
        logger.warning(
            f"the link to the server could not be measured ({error}): 1 stream; set "
            "diloco.link.streams if the link is long"
        )
        return 1
    plural = "s" * (speed.streams > 1)
    logger.info(f"link to the server: {speed}, {speed.streams} stream{plural}")
    return speed.streams
