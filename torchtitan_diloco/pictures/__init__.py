"""Pictures as plain data, drawn as SVG or as pixels. Needs nothing of a run but its records, and no torch."""
