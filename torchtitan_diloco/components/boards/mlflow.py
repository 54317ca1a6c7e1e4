"""Curves and settings on a tracking server of MLflow."""

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Full, Queue
from threading import Thread
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError, cause_of
from torchtitan_diloco.components.boards.base import Board, Shown

GROUP = "torchtitan_diloco.run"
"""Tag that the islands of a run have in common."""
SERVER = "MLFLOW_TRACKING_URI"
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
MOST_PARAMS = 100
"""Parameters that MLflow takes at once."""
MOST_WAITING = 1000
"""Calls that wait for a server, before new ones are dropped."""
CLOSE_SECONDS = 30.0
"""Longest wait for what is left at the end."""


class MLflow(Board):
    """Run in an experiment of MLflow, which a resumed run continues.

    A thread sends the numbers: a server that does not answer never stops training. The islands of a
    run have the same tag.
    """

    def __init__(self, experiment: str, shown: Shown) -> None:
        os.environ.setdefault(RETRIES, "2")  # else it takes minutes to say that nobody answers
        self._failed = False
        self._calls = Queue[Callable[[], Any] | None](MOST_WAITING)
        try:
            self._client = MlflowClient()
            self._run = self._begin(experiment, shown)
        except MlflowException as error:
            raise UserError(
                f'metrics.boards = "mlflow:{experiment}": {first_line(error)} ({SERVER} is the '
                "address of the server, MLFLOW_TRACKING_TOKEN or MLFLOW_TRACKING_USERNAME logs in)"
            ) from error
        self._thread = Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def _begin(self, experiment: str, shown: Shown) -> str:
        """Return the id of the run, which is a new one unless this worker resumes."""
        client = self._client
        named = shown.folder / "mlflow-run-id"
        if shown.step and named.exists():
            run: str = named.read_text()
            client.update_run(run, status="RUNNING")
            return run
        known = client.get_experiment_by_name(experiment)
        where = client.create_experiment(experiment) if known is None else known.experiment_id
        tags = {GROUP: shown.group} if shown.group else {}
        run = client.create_run(where, run_name=shown.name, tags=tags).info.run_id
        params = [Param(key, str(value)) for key, value in shown.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(run, params=params[first : first + MOST_PARAMS])
        shown.folder.mkdir(parents=True, exist_ok=True)
        named.write_text(run)
        return run

    def add(self, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        known = {name: value for name, value in values.items() if is_known(value)}
        metrics = [
            Metric(key=name, value=value, timestamp=now, step=step) for name, value in known.items()
        ]
        self._later(partial(self._client.log_batch, self._run, metrics=metrics))

    def add_text(self, step: int, name: str, text: str) -> None:
        tags = [RunTag(name, f"step {step}: {text}")]
        self._later(partial(self._client.log_batch, self._run, tags=tags))

    def add_sample(self, step: int, text: str) -> None:
        file = f"samples/step-{step:08}.txt"  # a tag is too short, and has only the latest
        self._later(partial(self._client.log_text, self._run, text, file))

    def close(self) -> None:
        self._later(partial(self._client.set_terminated, self._run))
        self._later(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail("did not take all numbers before the end")

    def _later(self, call: Callable[[], Any] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._fail("has not answered for long")

    def _send(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._fail(first_line(error))

    def _fail(self, reason: str) -> None:
        if not self._failed:
            gaps = "its curves have gaps, the records do not depend on it"
            logger.warning(f"MLflow: {reason}; {gaps}")
        self._failed = True


def is_known(value: float | None) -> bool:
    """Return whether MLflow takes a value: not every database has NaN."""
    return value is not None and math.isfinite(value)


def first_line(error: Exception) -> str:
    """Return the reason of an error, without the addresses of objects that follow it."""
    return cause_of(error).partition(" (Caused by")[0]
