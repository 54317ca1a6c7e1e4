"""Plan the outer loop for given links: docs/planning.md.

`prediction` computes utilisation from link, model and settings; `search` picks settings; `observed`
reads what a run measured; `paper` is the paper's own model.
"""
