"""Plan the outer loop for given links: docs/planning.md.

`prediction` computes utilisation, `scenario` knows the model and the bytes of an exchange,
`choice` picks settings, `observed` reads what a run measured, `paper` is the paper's own model.
"""

from torchtitan_diloco.planner.prediction import Conditions, Links, Prediction, even_links

__all__ = ["Conditions", "Links", "Prediction", "even_links"]
