"""Choose settings of the outer loop for a link, and predict what failures cost:
docs/report-and-plan.md.

`plan` is the command. `ladder` tries settings one after the other, `prediction` simulates a run
with them, and `paper` is the paper's own model, which prints its table. `failures` predicts goodput
in closed form.
"""
