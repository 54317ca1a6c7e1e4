"""Whether the parameters of a checkpoint mean the same in the model of this run.

Their names and shapes are compared when they are loaded. The settings here change neither.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint_folder import Manifest
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.decoder import SHAPES, resolve_shape, settings_of_shape

HEADS = ("heads", "kv_heads", "head_dim")
"""These say which rows of the projections belong together."""
POSITIONS = ("rotary_base", "rotary_scaling")
"""How attention sees positions. A new run may change it, as to train on longer sequences."""


def check_same_meaning(manifest: Manifest, model: Model, *, goes_on: bool) -> None:
    """Raise if the parameters of a checkpoint would mean something else in a model.

    `goes_on`: the run goes on with it, instead of starting from that of another run.
    """
    saved = tomllib.loads(manifest.config).get("model")
    if saved is None:
        return
    before = settings_of_section(saved)
    now = settings_of_section(asdict(model))
    names = (*HEADS, *POSITIONS) if goes_on else HEADS
    changed = [name for name in names if None not in (before[name], now[name])]
    changed = [name for name in changed if before[name] != now[name]]
    if not changed:
        return
    listed = ", ".join(f"model.{name} = {before[name]} (here {now[name]})" for name in changed)
    remedy = f"set {'this' if len(changed) == 1 else 'these'} as there"
    if not set(changed) & set(HEADS):
        remedy += ", or start a new run from that checkpoint with checkpoint.resume"
    raise UserError(
        f"the checkpoint of step {manifest.step} of the run {manifest.run} was trained with "
        f"{listed}, by model.flavor or by a setting, so its parameters would mean something else: "
        f"{remedy}"
    )


def settings_of_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a [model] section by name, with what its flavor sets.

    Keys that are no settings of this version are left out. Of a flavor that is not known here, such
    as one of the user, only what the section itself sets is known: the rest is None. Raise if the
    settings give no model.
    """
    names = {field.name for field in fields(Model)}
    model = Model(**{key: value for key, value in section.items() if key in names})
    if model.flavor not in SHAPES:
        return asdict(model)
    return settings_of_shape(resolve_shape(model))
