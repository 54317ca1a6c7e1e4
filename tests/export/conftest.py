import os
import tempfile

# huggingface_hub and transformers read these when they are imported, which is after this file.
# Nothing is left in the home folder of the user.
_home = tempfile.TemporaryDirectory()
os.environ |= {
    "HF_HOME": _home.name,
    "HF_MODULES_CACHE": f"{_home.name}/modules",
    "HF_HUB_OFFLINE": "1",
}
