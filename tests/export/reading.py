from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_diloco.components.validation import ValidationResult, open_held_out, validate
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.export.hugging_face import save_hugging_face
from torchtitan_diloco.export.weights import SavedModel, open_weights
from torchtitan_diloco.models.decoder import Decoder, resolve_shape
from torchtitan_diloco.models.interface import separate_documents

ROWS = 320
LENGTH = 24
VOCABULARY = 257
BYTES = build_tokenizer("bytes")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, or of the files in a folder."""
    with open_weights(path) as stored:
        return {name: file.get_tensor(name) for name, file in stored.items()}


def build(config: Model, seed: int = 0) -> Decoder:
    """Return a model whose weights are so large that attention, norms and positions matter."""
    model = Decoder(resolve_shape(config), ROWS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def save(model: Decoder, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_hugging_face(folder, model, BYTES, dtype, sequence_length=LENGTH)


def load(folder: Path, **options: Any) -> Any:
    """Return the model of a folder, in transformers."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(report.values()), "nothing is missing, newly initialized or left over"
    return model


def validation_of(saved: SavedModel) -> ValidationResult:
    """Return what the validation of a training measures, here of a saved model in one process."""
    if saved.config.model.document_mask:
        separate_documents(saved.model, saved.tokenizer.end_of_document)
    world = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
    held_out = open_held_out(saved.config, saved.tokenizer, world, each_worker_has_its_own=False)
    return validate(saved.model, held_out, world, saved.config.data.mixtures[-1])
