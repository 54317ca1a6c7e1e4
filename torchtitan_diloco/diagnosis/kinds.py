"""What a verdict can say, and how it is said to users."""

from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_diloco.diloco.vitals import ALL_WORKERS, VerdictKind


class Words(NamedTuple):
    has: str
    """What the culprit has done or been since the verdict began."""
    was: str
    """How it was until the verdict ended."""
    remedy: str


WORDS = {
    VerdictKind.STOPPED: Words(
        "not taken part", "absent", "Check that its processes and its machine are running."
    ),
    VerdictKind.HUNG: Words(
        "made no step",
        "hung",
        "The stacks of its threads are in its folder. Restart it if it does not go on.",
    ),
    VerdictKind.STUCK: Words(
        "hung in communication",
        "hung",
        "Check this path: it may lose packets, perhaps only large ones (its MTU).",
    ),
    VerdictKind.NO_ROOM: Words(
        "had no room in the store",
        "without room in the store",
        "Free space there, or raise the quota of its login. Until then, it trains on, and nothing "
        "of it is merged.",
    ),
    VerdictKind.LOAD: Words(
        "been short of CPU cores",
        "short of CPU cores",
        "Stop other programs there, or start fewer threads (OMP_NUM_THREADS). Until then, "
        "speeds and links are not judged.",
    ),
    VerdictKind.COMPUTE: Words(
        "computed slowly",
        "slow",
        "Check its clock speed, temperature and other processes, or lower its batch size.",
    ),
    VerdictKind.DATA: Words(
        "waited long for data",
        "slow",
        "Raise data.prefetch there, or move its data to a faster disk.",
    ),
    VerdictKind.SAVE: Words(
        "spent long on checkpoints",
        "slow",
        "Check the disk of its run.folder, or save less often.",
    ),
    VerdictKind.LINK: Words(
        "been slow",
        "slow",
        "Measure this path with `doctor`, raise H or tau, or send fewer bits.",
    ),
    VerdictKind.SENDING: Words(
        "sent slowly",
        "slow",
        "Measure its uplink with `doctor`, raise H or tau, or send fewer bits.",
    ),
    VerdictKind.RECEIVING: Words(
        "received slowly", "slow", "Measure its downlink with `doctor`, or raise H or tau."
    ),
    VerdictKind.NUMBERS: Words(
        "sent wrong numbers",
        "wrong",
        "Its work is left out. Lower its learning rate, or test its memory.",
    ),
    VerdictKind.EVERYBODY: Words(
        "become slower",
        "slower",
        "Check what all share: storage, power, cooling, a larger batch.",
    ),
}


@dataclass(frozen=True)
class Grammar:
    """The words of a sentence about a verdict that depend on its culprit."""

    subject: str
    """With `{}` for the name of the culprit."""
    pronoun: str
    has: str
    is_: str
    was: str


SINGULAR = Grammar(subject="{}", pronoun="it", has="has", is_="is", was="was")
PLURAL = Grammar(subject="all workers", pronoun="they", has="have", is_="are", was="were")


class Cause(NamedTuple):
    kind: VerdictKind
    culprit: str
    """A worker, a link, or `ALL_WORKERS`."""


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
        grammar = PLURAL if culprit == ALL_WORKERS else SINGULAR
        name = f"the link {culprit}" if kind is VerdictKind.LINK else culprit
        subject = grammar.subject.format(name)
        if self.over:
            before = f"{grammar.pronoun} {grammar.was} {words.was} from step {self.since}"
            return f"{subject} {grammar.is_} back to normal ({before})"
        evidence = self.evidence and f": {self.evidence}"
        begun = f"{subject} {grammar.has} {words.has} since step {self.since}{evidence}"
        return f"{begun}. {words.remedy}"
