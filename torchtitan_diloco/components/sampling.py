"""Texts that a model writes after prompts."""

import time
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.base.user import UserError, cause_of
from torchtitan_diloco.components.records import SampleRecord
from torchtitan_diloco.components.run_data import RunData
from torchtitan_diloco.components.run_plan import AfterStep
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.config.schema import Config, format_value
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.diloco.data_parallel import OuterLoop
from torchtitan_diloco.models.generation import generate

TEMPERATURE = 0.8
"""Default of what divides the logits."""
SAMPLE_TOKENS = 64
"""Most tokens of a sample after its prompt."""


@dataclass(frozen=True)
class Prompt:
    """The tokens of a text that a model continues."""

    begin: list[int]
    """Tokens that precede the text, as in training. They are not shown."""
    text: list[int]

    @property
    def tokens(self) -> list[int]:
        """All that the model reads."""
        return [*self.begin, *self.text]


def encode_prompt(
    text: str,
    tokenizer: Tokenizer,
    *,
    begins_documents: bool,
    sequence_length: int,
    source: str,
) -> Prompt:
    """Return the tokens of a prompt. Raise a UserError if the model cannot read all of them.

    `begins_documents`: as in `Manifest`. `source`: of the text, for the error.
    """
    begin = list[int]()
    if begins_documents and tokenizer.begin_of_document is not None:
        begin = [tokenizer.begin_of_document]
    elif not text:
        begin = [tokenizer.end_of_document]  # a document follows the end of another one
    prompt = Prompt(begin, tokenizer.encode(text).tolist())
    if len(prompt.tokens) > sequence_length:
        limit = f"training.sequence_length = {sequence_length:,}"
        count = len(prompt.tokens)
        raise UserError(f"{source} has {count:,} tokens, more than {limit}: shorten it")
    return prompt


# --- while a run trains ---------------------------------------------------------------------------


@dataclass
class Sampler:
    """Writes samples with the shared parameters."""

    every: int
    """Steps between two samples, 0 for none."""
    prompt: Prompt
    """The text that each sample continues."""
    sequence_length: int
    tokenizer: Tokenizer
    model: nn.Module
    outer: OuterLoop

    def is_due(self, after: AfterStep) -> bool:
        return after.is_measured(self.every)

    def sample(self, step: int, telemetry: Telemetry) -> float:
        """Write a sample, report it, and return the duration in seconds. An error is only logged.

        All ranks of a worker call this at the same step.
        """
        started = time.perf_counter()
        try:
            text = self._write()
        except Exception as error:
            logger.warning(f"no sample after step {step}: {cause_of(error)}")
        else:
            logger.info(f"sample after step {step}: {format_value(text)}")
            telemetry.files.write(SampleRecord(step=step, time=time.time(), text=text))
        return time.perf_counter() - started

    def _write(self) -> str:
        """Return the prompt and its continuation."""
        end = self.tokenizer.end_of_document
        was_training = self.model.training
        self.model.eval()
        try:
            with self.outer.global_parameters():
                (tokens,) = generate(
                    self.model,
                    [self.prompt.tokens],
                    vocab_size=self.tokenizer.vocab_size,
                    sequence_length=self.sequence_length,
                    max_new_tokens=SAMPLE_TOKENS,
                    temperature=TEMPERATURE,
                    # Ranks that share a model gather it for each token, so all draw equally many.
                    stop=None,
                    # Gathering takes as long for one token as for all. And blocks may be compiled.
                    use_cache=False,
                )
        finally:
            self.model.train(was_training)
            drop_gathered(self.model)
        written = takewhile(lambda token: token != end, tokens)
        return self.tokenizer.decode([*self.prompt.text, *written])


def build_sampler(
    config: Config, tokenizer: Tokenizer, model: nn.Module, outer: OuterLoop, data: RunData
) -> Sampler:
    settings = config.validation
    length = config.training.sequence_length
    source = f"validation.sample_prompt = {format_value(settings.sample_prompt)}"
    return Sampler(
        every=settings.sample_every,
        prompt=encode_prompt(
            settings.sample_prompt,
            tokenizer,
            begins_documents=data.begins_documents,
            sequence_length=length,
            source=source,
        ),
        sequence_length=length,
        tokenizer=tokenizer,
        model=model,
        outer=outer,
    )
