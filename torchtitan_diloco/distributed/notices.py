"""Notices that a machine is about to be taken away, from the metadata server of its cloud.

The dialects follow the documentation of the providers:
  AWS    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
         and .../rebalance-recommendations.html, with a token (IMDSv2)
  GCP    https://cloud.google.com/compute/docs/instances/create-use-preemptible
  Azure  https://learn.microsoft.com/en-us/azure/virtual-machines/linux/scheduled-events
"""

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from types import TracebackType
from typing import NamedTuple, Self
from urllib.error import HTTPError

from torchtitan_diloco.base.log import logger

POLL_SECONDS = {"aws": 5.0, "gcp": 1.0, "azure": 1.0}
"""Seconds between queries, as the providers recommend."""
NOTICE_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds between a notice and the end of the machine. Azure may give more."""
ANSWER_SECONDS = 5.0
FAILURES = 3
"""Consecutive queries without an answer after which a warning is logged, once."""
ADDRESSES = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
MOST_BYTES = 2**20
LOSES_THE_MACHINE = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Types of Azure's events that end the processes. `Freeze` only pauses them for seconds."""


class Notice(NamedTuple):
    what: str
    seconds: float | None = None
    """Seconds that are left, if known."""
    stops: bool = True
    """Whether the machine will be taken away. Otherwise it may be, and the run only saves."""


class Reply(NamedTuple):
    status: int
    text: str


class Metadata:
    """A metadata server, which is queried directly, regardless of proxies."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token = ""

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Reply:
        """Return the reply of the server, also to a request that it refuses."""
        request = urllib.request.Request(
            f"{self.address}{path}", headers=dict(headers), method=method
        )
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as reply:
                return Reply(reply.status, reply.read(MOST_BYTES).decode(errors="replace").strip())
        except HTTPError as error:
            with error:
                return Reply(error.code, "")

    def ask_aws(self, path: str) -> str:
        """Return the answer of AWS, or an empty string if there is none."""
        for _ in range(2):
            if not self._token:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                self._token = _expected(self.ask("/latest/api/token", ttl, method="PUT"))
            answer = self.ask(path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._token = ""  # it has expired
        return "" if answer.status == 404 else _expected(answer)


def _expected(answer: Reply) -> str:
    if answer.status != 200:
        raise ValueError(f"status {answer.status}")
    return answer.text


# --- dialects -------------------------------------------------------------------------------------


def ask_aws(server: Metadata) -> Notice | None:
    if text := server.ask_aws("/latest/meta-data/spot/instance-action"):
        planned = json.loads(text)
        at = datetime.fromisoformat(planned["time"].replace("Z", "+00:00"))
        return Notice(f"AWS will {planned['action']} this machine", _seconds_until(at))
    if server.ask_aws("/latest/meta-data/events/recommendations/rebalance"):
        return Notice("AWS may soon take this machine away (rebalance recommendation)", stops=False)
    return None


def ask_gcp(server: Metadata) -> Notice | None:
    path = "/computeMetadata/v1/instance/preempted"
    headers = {"Metadata-Flavor": "Google"}
    answer = _expected(server.ask(path, headers))
    if answer not in ("TRUE", "FALSE"):
        raise ValueError(f"{answer[:40]!r} is neither TRUE nor FALSE")
    if answer == "FALSE":
        return None
    return Notice("GCP will preempt this machine", NOTICE_SECONDS["gcp"])


def ask_azure(server: Metadata) -> Notice | None:
    headers = {"Metadata": "true"}
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    events = json.loads(_expected(server.ask(path, headers)))["Events"]
    events = [event for event in events if event["EventType"] in LOSES_THE_MACHINE]
    if not events:
        return None
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = _expected(server.ask(path, headers))
    for event in events:  # those of all machines of a set
        if name in event["Resources"]:
            before = event.get("NotBefore", "")  # empty once it has begun
            seconds = _seconds_until(parsedate_to_datetime(before)) if before else 0.0
            return Notice(f"Azure has scheduled {event['EventType']} for this machine", seconds)
    return None


def _seconds_until(at: datetime) -> float:
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


DIALECTS: dict[str, Callable[[Metadata], Notice | None]] = {
    "aws": ask_aws,
    "gcp": ask_gcp,
    "azure": ask_azure,
}


# --- watching -------------------------------------------------------------------------------------


class NoticeWatch:
    """Queries a metadata server in a thread, and reports each notice once. The last one stops the
    run.

    If a server does not answer, one warning is logged, and the queries continue.
    """

    def __init__(self, cloud: str, address: str, tell: Callable[[Notice], None]) -> None:
        """Prepare the queries. `cloud`: a key of DIALECTS, or "none"."""
        self._cloud = cloud
        self._tell = tell
        self._address = address or ADDRESSES.get(cloud, "")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll_server, name="notices", daemon=True)
        self._warned = False

    def check_time(self, steps: int, step_seconds: float, save_seconds: float) -> None:
        """Warn once if a notice leaves less time than the run needs to stop and save.

        `steps`: the most that it trains after a notice. `step_seconds`, `save_seconds`: 0 as long
        as they are not known.
        """
        if self._cloud == "none" or self._warned or not step_seconds:
            return
        given = NOTICE_SECONDS[self._cloud]
        needed = steps * step_seconds + save_seconds
        if needed <= given:
            return
        self._warned = True
        saving = f" and a save of {save_seconds:.1f} s" if save_seconds else ", without a save"
        logger.warning(
            f'run.preemption = "{self._cloud}" gives a notice of {given:.0f} s, but this run needs '
            f"{needed:.0f} s to stop ({steps} steps of {step_seconds:.1f} s{saving}), so it may "
            "lose the steps since its last checkpoint: lower checkpoint.every_minutes, or train "
            "islands, which do not agree on a step"
        )

    def __enter__(self) -> Self:
        if self._cloud != "none":
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()

    def _poll_server(self) -> None:
        """Query the server until the watch is closed or a notice stops the run."""
        server = Metadata(self._address)
        told = set[str]()
        failures = 0
        while not self._closed.is_set():
            try:
                notice = DIALECTS[self._cloud](server)
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                failures += 1
                if failures == FAILURES:
                    logger.warning(
                        f'run.preemption = "{self._cloud}": {server.address} does '
                        f"not return a valid answer ({error}); training continues "
                        "without notices"
                    )
            else:
                if failures < FAILURES:
                    failures = 0
                if notice is not None and notice.what not in told:
                    told.add(notice.what)
                    self._tell(notice)
                    if notice.stops:
                        return
            self._closed.wait(POLL_SECONDS[self._cloud])
