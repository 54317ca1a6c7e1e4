"""Workers as jobs of their own. Only the rules exist so far (docs/islands.md)."""
