"""Choose settings of the outer loop for a link: docs/report-and-plan.md.

`ladder` tries settings one after the other, `prediction` simulates a run with them, and `paper` is
the paper's own model, which prints its table.
"""
