"""python -m torchtitan_diloco.config > docs/configuration.md"""

from torchtitan_diloco.config.reference import markdown

print(markdown(), end="")
