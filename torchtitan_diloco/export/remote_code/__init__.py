"""Source files that an exported folder carries along. They run on machines without this package: torch, transformers and
each other are all they may import."""
