"""Flags of a delta, which its header carries: why it is left out of the mean."""

NOT_FINITE = 1  # the sender's delta has a NaN or an infinity
DROPPED = 2  # the sender is left out by link.drop_probability
OUTLIER = 4  # the norm of the sender's delta exceeds delta_norm_limit
FLAG_NAMES = {NOT_FINITE: "not finite", DROPPED: "dropped", OUTLIER: "outlier"}
WENT_WRONG = NOT_FINITE | OUTLIER
"""Flags after which a worker takes the shared parameters."""
