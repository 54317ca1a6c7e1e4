"""What is missing before a start."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from torchtitan_diloco.config import load_config
from torchtitan_diloco.launching.preflight import missing


@pytest.mark.parametrize("several", ["", "NNODES", "GROUP_WORLD_SIZE"])
def test_a_checkpoint_to_start_from_may_be_on_another_node_or_no_longer_needed(
    several: str, tmp_path: Path
) -> None:
    (tmp_path / "base/worker-1/step-00000002").mkdir(parents=True)
    (tmp_path / "begun/worker-0/step-00000002.incomplete").mkdir(parents=True)
    (tmp_path / "run/worker-0/step-00000003").mkdir(parents=True)
    places = {"base": True, "base/worker-0/step-00000002": True, "begun": False, "none": False}
    with patch.dict(os.environ, {several: "2"} if several else {}):
        for folder in ("new", "run"):
            for place, is_there in places.items():
                chosen = {"run.folder": f"{tmp_path}/{folder}"}
                chosen |= {"checkpoint.resume": f"{tmp_path}/{place}"}
                problems = [*missing(load_config("debug", chosen))]
                assert bool(problems) == (not (is_there or several or folder == "run")), place
