"""Multiple-choice tasks that are made from held-out text, and whose chance is therefore known.

A model answers with the choice that it finds most likely after the context. All choices of an
example have the same number of characters, so that none is more likely because it is shorter.
"""

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

from torchtitan_diloco.base.user import UserError

CONTEXT = 96
"""Characters before an identifier that a model is to name."""
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w{3,7}\b", re.ASCII)
LISTED = 6
"""Words in a list to copy from."""
BRACKETS = {"(": ")", "[": "]", "{": "}"}
TRIES = 50
"""Draws for each example that is wanted."""


class Example(NamedTuple):
    context: str
    choices: list[str]
    answer: int
    """Number of the right choice."""

    @property
    def right(self) -> str:
        return self.choices[self.answer]


@dataclass(frozen=True)
class Text:
    documents: Sequence[str]

    @cached_property
    def identifiers(self) -> list[re.Match[str]]:
        """All identifiers that have a context, and enough others of their length."""
        lengths = set(self.lengths)
        return [
            match
            for document in self.documents
            for match in IDENTIFIER.finditer(document, CONTEXT // 4)
            if len(match[0]) in lengths
        ]

    @cached_property
    def words(self) -> dict[int, list[str]]:
        """Identifiers by their length, each as often as it occurs."""
        words: dict[int, list[str]] = {}
        for document in self.documents:
            for word in IDENTIFIER.findall(document):
                words.setdefault(len(word), []).append(word)
        return words

    @cached_property
    def distinct(self) -> dict[int, list[str]]:
        return {length: sorted(set(words)) for length, words in self.words.items()}

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of which there are enough different words."""
        lengths = sorted(length for length, words in self.distinct.items() if len(words) >= LISTED)
        if not lengths:
            raise UserError(
                f"the held-out text of {len(self.documents)} documents has too few words: raise "
                "data.validation_fraction, or use a larger --corpus"
            )
        return lengths

    def draw_words(self, count: int, draw: random.Random) -> list[str]:
        """Return different words of the same length, each as likely as any other."""
        return draw.sample(self.distinct[draw.choice(self.lengths)], count)


# --- tasks ----------------------------------------------------------------------------------------


def example_of(context: str, right: str, wrong: Sequence[str], draw: random.Random) -> Example:
    """Return an example whose choices are in random order."""
    choices = draw.sample([right, *wrong], 1 + len(wrong))
    return Example(context, choices, choices.index(right))


def name_next_identifier(text: Text, draw: random.Random) -> Example:
    """Ask for the identifier that continues the text, beside others that are drawn by frequency."""
    match = draw.choice(text.identifiers)
    document = match.string
    word = match[0]
    wrong: list[str] = []
    while len(wrong) < 3:
        other = draw.choice(text.words[len(word)])
        if other not in (word, *wrong):
            wrong.append(other)
    # Tokenizers join a space to the word that follows it.
    space = " " if document[match.start() - 1] == " " else ""
    end = match.start() - len(space)
    context = document[max(0, end - CONTEXT) : end]
    return example_of(context, space + word, [space + other for other in wrong], draw)


def copy_word(text: Text, draw: random.Random) -> Example:
    """Ask for the word that follows another one in a list. All choices are in the list once."""
    words = text.draw_words(LISTED, draw)
    number = draw.randrange(LISTED - 1)
    word_before, right = words[number : number + 2]
    wrong = draw.sample([word for word in words[1:] if word not in (word_before, right)], 3)
    context = f"{' '.join(words)}\n{word_before}"
    return example_of(context, f" {right}", [f" {word}" for word in wrong], draw)


def match_bracket(text: Text, draw: random.Random) -> Example:
    """Ask for the bracket that closes the innermost open one, which is not the last one opened."""
    words = iter(text.draw_words(LISTED, draw))
    context = ""
    still_open: list[str] = []
    for number in range(LISTED - 2):
        if number > 1 and len(still_open) > 1 and draw.random() < 0.5:
            context += f"{next(words)}{BRACKETS[still_open.pop()]}, "
        else:
            still_open.append(draw.choice(list(BRACKETS)))
            context += next(words) + still_open[-1]
    closed = draw.choice(list(BRACKETS))
    context += f"{next(words)}{closed}{next(words)}{BRACKETS[closed]}"
    right = BRACKETS[still_open[-1]]
    return example_of(
        context, right, [bracket for bracket in BRACKETS.values() if bracket != right], draw
    )


def add_numbers(_: Text, draw: random.Random) -> Example:
    """Ask for the sum of two numbers of three digits, beside others with one or two of two digits
    changed.

    The choices are all combinations of two digits in two places, so that whoever only prefers some
    digits to others is right in a quarter of the questions.
    """
    total = draw.randint(200, 999)
    first = draw.randint(100, total - 100)
    digits = str(total)
    places = draw.sample(range(3), 2)
    changed = {
        place: draw.choice([digit for digit in "123456789" if digit != digits[place]])
        for place in places
    }
    wrong = [
        "".join(changed[place] if place in chosen else digits[place] for place in range(3))
        for chosen in (places[:1], places[1:], places)
    ]
    return example_of(
        f"{first} + {total - first} =", f" {total}", [f" {number}" for number in wrong], draw
    )


TASKS: dict[str, Callable[[Text, random.Random], Example]] = {
    "next identifier": name_next_identifier,
    "copying": copy_word,
    "bracket matching": match_bracket,
    "three-digit addition": add_numbers,
}


def make_examples(
    task: str, text: Text, count: int, seed: object, without: Collection[str] = ()
) -> list[Example]:
    """Return examples with different contexts, none of which is in `without`.

    The same text and seed give the same examples.
    """
    draw = random.Random(f"{task}, {seed}")
    examples = dict[str, Example]()
    for _ in range(TRIES * count):
        example = TASKS[task](text, draw)
        if example.context not in without:
            examples.setdefault(example.context, example)
        if len(examples) == count:
            return list(examples.values())
    raise UserError(
        f"the held-out text of {len(text.documents)} documents is too short for {count} examples "
        f"of {task}: raise data.validation_fraction, or lower --examples"
    )


def examples_of_all(
    task: str, texts: Sequence[Text], count: int, seed: object, without: Collection[str] = ()
) -> list[Example]:
    """Return examples of several corpora in turn, as many of each."""
    known = set(without)
    of_texts = list[list[Example]]()
    for number, text in enumerate(texts[:count]):
        of_this_text = -(-(count - number) // len(texts))
        name = f"{seed}, corpus {number}" if number else seed
        of_texts.append(make_examples(task, text, of_this_text, name, without=known))
        known |= {example.context for example in of_texts[-1]}
    turns = chain.from_iterable(zip_longest(*of_texts))
    return [example for example in turns if example is not None]
