"""What links between workers cost a run, before it is started: docs/planning.md.

`prediction` says how much of its time a run computes, `paper_model` what the model of Streaming DiLoCo's paper says, and
`choice` which settings reach a wanted utilisation with the least risk to the loss. A user meets them in
`torchtitan_diloco.plan`. Of these `outer_loop`, `workload`, and what builds on them, need torch, as the formats on the wire and
the model do.
"""

from torchtitan_diloco.planner.conditions import Conditions, Links, even_links
from torchtitan_diloco.planner.payload import Payload
from torchtitan_diloco.planner.prediction import Prediction, predict, predict_data_parallel

__all__ = [
    "Conditions",
    "Links",
    "Payload",
    "Prediction",
    "even_links",
    "predict",
    "predict_data_parallel",
]
