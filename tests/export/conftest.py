import os
import tempfile

# Read when huggingface_hub and transformers are imported, which no test has done yet: nothing is left in the user's home.
_home = tempfile.TemporaryDirectory()
os.environ |= {
    "HF_HOME": _home.name,
    "HF_MODULES_CACHE": f"{_home.name}/modules",
    "HF_HUB_OFFLINE": "1",
}
