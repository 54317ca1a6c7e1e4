"""Choose settings of the outer loop for a link, and predict what failures cost:
docs/report-and-plan.md.

`ladder` tries settings one after the other, and `prediction` simulates a run with them. `failures`
predicts goodput, with what `absence` measures on the rules of the islands.
"""
