"""Settings that are allowed and known to go wrong, told at start. The measurements behind them: docs/algorithm.md."""

from torchtitan_diloco.diloco.config import DiLoCo

FEW_ROUNDS = 100


def advice(config: DiLoCo, total_steps: int) -> list[str]:
    if config.method == "none":
        return []
    found = []
    rounds = total_steps // config.sync_every
    outer = config.outer_optimizer
    if rounds == 0:
        found.append(
            f"diloco.sync_every = {config.sync_every} is longer than the run of {total_steps} steps: nothing is ever "
            "exchanged and the workers end apart; lower it"
        )
    elif rounds < FEW_ROUNDS:
        found.append(
            f"the run has {rounds} outer rounds ({total_steps} steps / diloco.sync_every = {config.sync_every}); with fewer "
            f"than about {FEW_ROUNDS} the loss stays behind data parallelism: lower diloco.sync_every or train longer"
        )
    heavy = outer.lr / (1 - outer.momentum) if outer.name in ("nesterov", "momentum") else outer.lr
    if config.sync_every <= 10 and config.overlap.mixing < 0.25 and heavy > 5:
        found.append(
            f"diloco.outer_optimizer.lr = {outer.lr:g} with momentum {outer.momentum:g}, diloco.sync_every = "
            f"{config.sync_every} and diloco.overlap.mixing = {config.overlap.mixing:g} is known to be unstable: set "
            "mixing to 0.5, or lower the outer lr"
        )
    if config.quantization.error_feedback:
        found.append(
            "diloco.quantization.error_feedback cost more than it gave where it was measured (docs/algorithm.md): leave it off "
            "unless a run of your own shows a gain"
        )
    return found
