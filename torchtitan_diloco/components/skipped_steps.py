"""Steps that are skipped as their gradient is not finite."""

import math
from dataclasses import dataclass

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError


@dataclass
class SkippedSteps:
    """Counts consecutive steps whose gradient is not finite, and raises after too many."""

    limit: int
    in_a_row: int = 0

    def count(self, step: int, norm: float) -> bool:
        """Return whether to skip the step."""
        if math.isfinite(norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        if self.in_a_row == 1:
            logger.warning(f"step {step}: gradient norm is {norm}; skip steps until it is finite")
        if self.in_a_row > self.limit:
            raise UserError(
                f"more than training.max_skipped_steps = {self.limit} steps up to step {step} had "
                "gradients that are not finite: lower optimizer.lr, or lengthen the warm-up"
            )
        return True
