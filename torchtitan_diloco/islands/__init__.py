"""Workers as jobs of their own (docs/islands.md)."""
