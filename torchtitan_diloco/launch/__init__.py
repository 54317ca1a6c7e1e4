"""From one command to the training processes of this machine: `python -m torchtitan_diloco.launch ARGUMENTS`."""
