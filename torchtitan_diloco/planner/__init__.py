"""Plan the outer loop for given links: docs/planning.md.

`prediction` computes utilisation from link, model and settings; `search` picks settings; `probe`
reads what a run has measured; `paper` is the paper's own model.
"""
