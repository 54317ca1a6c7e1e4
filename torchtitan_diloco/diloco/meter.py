"""Where the time of the outer loop goes, between two reports."""

from dataclasses import dataclass

from torchtitan_diloco.diloco.exchange import Traffic


@dataclass
class Meter:
    sending_seconds: float = 0.0
    waiting_seconds: float = 0.0
    merging_seconds: float = 0.0
    exchange_seconds: float = 0.0
    fragments: int = 0
    participants: int = 0

    def metrics(self, traffic: Traffic) -> dict[str, float]:
        """`exposed` is what the training thread spent or waited; `exchange` went on in the background meanwhile."""
        return {
            "diloco/fragments_applied": float(self.fragments),
            "diloco/participants": float(self.participants),
            "diloco/exposed_seconds": self.sending_seconds + self.waiting_seconds + self.merging_seconds,
            "diloco/exposed_waiting_seconds": self.waiting_seconds,
            "diloco/exchange_seconds": self.exchange_seconds,
            "diloco/coding_seconds": traffic.coding_seconds,
            "diloco/transfer_waiting_seconds": traffic.waiting_seconds,
            "diloco/sent_bytes": float(traffic.bytes_sent),
            "diloco/received_bytes": float(traffic.bytes_received),
        }
