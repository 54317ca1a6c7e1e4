"""What a verdict can say, and how it is said to users."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

ALL = "all"
"""The culprit of a verdict about all workers."""


class Kind(StrEnum):
    """What is wrong."""

    STOPPED = "stopped"
    HUNG = "hung outside communication"
    STUCK = "hung in communication"
    NO_ROOM = "full store"
    LOAD = "busy cores"
    COMPUTE = "slow compute"
    DATA = "slow data"
    SAVE = "slow save"
    LINK = "slow link"
    SENDING = "slow sending"
    RECEIVING = "slow receiving"
    NUMBERS = "wrong numbers"
    EVERYBODY = "everybody slow"


class Words(NamedTuple):
    has: str
    """What the culprit has done or been since the verdict began."""
    was: str
    """How it was until the verdict ended."""
    remedy: str


WORDS = {
    Kind.STOPPED: Words(
        "not taken part", "absent", "Check that its processes and its machine are running."
    ),
    Kind.HUNG: Words(
        "made no step",
        "hung",
        "The stacks of its threads are in its folder. Restart it if it does not go on.",
    ),
    Kind.STUCK: Words(
        "hung in communication",
        "hung",
        "Check this path: it may lose packets, perhaps only large ones (its MTU).",
    ),
    Kind.NO_ROOM: Words(
        "had no room in the store",
        "without room in the store",
        "Free space there, or raise the quota of its login. Until then, it trains on, and nothing "
        "of it is merged.",
    ),
    Kind.LOAD: Words(
        "been short of CPU cores",
        "short of CPU cores",
        "Stop other programs there, or start fewer threads (OMP_NUM_THREADS). Until then, "
        "speeds and links are not judged.",
    ),
    Kind.COMPUTE: Words(
        "computed slowly",
        "slow",
        "Check its clock speed, temperature and other processes, or lower its batch size.",
    ),
    Kind.DATA: Words(
        "waited long for data",
        "slow",
        "Raise data.prefetch there, or move its data to a faster disk.",
    ),
    Kind.SAVE: Words(
        "spent long on checkpoints",
        "slow",
        "Check the disk of its run.folder, or save less often.",
    ),
    Kind.LINK: Words(
        "been slow",
        "slow",
        "Measure this path with `doctor`, raise H or tau, or send fewer bits.",
    ),
    Kind.SENDING: Words(
        "sent slowly",
        "slow",
        "Measure its uplink with `doctor`, raise H or tau, or send fewer bits.",
    ),
    Kind.RECEIVING: Words(
        "received slowly", "slow", "Measure its downlink with `doctor`, or raise H or tau."
    ),
    Kind.NUMBERS: Words(
        "sent wrong numbers",
        "wrong",
        "Its work is left out. Lower its learning rate, or test its memory.",
    ),
    Kind.EVERYBODY: Words(
        "become slower",
        "slower",
        "Check what all share: storage, power, cooling, a larger batch.",
    ),
}


class Cause(NamedTuple):
    kind: Kind
    culprit: str
    """A worker, a link, or `ALL`."""


@dataclass(frozen=True)
class Verdict:
    cause: Cause
    evidence: str
    since: int
    """Step after which it was first seen."""
    over: bool = False

    def __str__(self) -> str:
        kind, culprit = self.cause
        words = WORDS[kind]
        subject = culprit
        pronoun = "it"
        has = "has"
        is_ = "is"
        was = "was"
        if culprit == ALL:
            subject = "all workers"
            pronoun = "they"
            has = "have"
            is_ = "are"
            was = "were"
        elif kind is Kind.LINK:
            subject = f"the link {culprit}"
        if self.over:
            before = f"{pronoun} {was} {words.was} from step {self.since}"
            return f"{subject} {is_} back to normal ({before})"
        evidence = self.evidence and f": {self.evidence}"
        return f"{subject} {has} {words.has} since step {self.since}{evidence}. {words.remedy}"
