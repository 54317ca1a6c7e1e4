"""Check the results of the CUDA paths on one GPU, and measure them, in at most nine minutes.

    .venv/bin/python -m benchmarks.gpu --out DIR [--only bits,save]

Each part runs in a process with a time limit of its own. If one fails, the table says so and the
others still run. DIR/gpu.json and DIR/gpu.md have the expected and measured values, DIR/PART.txt
the output of a part. With `--miniature` every part runs on the CPU with small sizes, to show that
the command works. Its figures mean nothing.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path

import torch

from benchmarks import core
from benchmarks.gpu_parts import GPU, MINIATURE, PARTS, Check, Scale
from torchtitan_diloco.hardware import describe_device
from torchtitan_diloco.log import markdown_table

TOTAL_SECONDS = 530
NOT_PROVEN = """
Not proven by one GPU: FSDP2 and NCCL over several GPUs, workers on several machines, the speed of
a real link, and losses of workers in the middle of an exchange on GPUs."""


def run_part(name: str, seconds: float, out: Path, more: list[str]) -> list[Check]:
    """Run a part in a new process group, and return its checks, or one that says how it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--part", name, *more]
    result, printed = out / f"{name}.json", out / f"{name}.txt"
    result.unlink(missing_ok=True)
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            end = f"exit code {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"not done in {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode == 0:
        return [Check(**check) for check in json.loads(result.read_text())]
    last = printed.read_text(errors="replace").strip().splitlines()[-1:]
    return [Check("the whole part", "exit code 0", ": ".join([end, *last]), passed=False)]


def versions(scale: Scale) -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    on_gpu = scale.device.type == "cuda"
    return {
        "device": describe_device(scale.device),
        "torch": torch.__version__,
        "triton": metadata.version("triton") if util.find_spec("triton") else "-",
        "driver": subprocess.check_output(query, text=True).split()[0] if on_gpu else "-",
        "python": platform.python_version(),
    }


def report(out: Path, found: Mapping[str, str], results: Mapping[str, list[Check]]) -> str:
    words = {True: "ok", False: "FAILED", None: "-"}
    rows = [
        [part, check.what, check.expected, check.measured, words[check.passed]]
        for part, checks in results.items()
        for check in checks
    ]
    table = markdown_table(["part", "what", "expected", "measured", ""], rows)
    text = "; ".join(f"{key} {value}" for key, value in found.items()) + f"\n\n{table}\n"
    parts = {part: [asdict(check) for check in checks] for part, checks in results.items()}
    (out / "gpu.json").write_text(json.dumps({"versions": found, "parts": parts}, indent=1))
    (out / "gpu.md").write_text(text)
    return text


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--out", type=core.folder, required=True, metavar="DIR")
    parser.add_argument("--only", default="", help="parts: " + ", ".join(PARTS))
    parser.add_argument("--miniature", action="store_true", help="on the CPU, small sizes")
    parser.add_argument("--part", choices=PARTS, help="run this part in this process")
    options = parser.parse_args()
    scale = MINIATURE if options.miniature else GPU
    out = options.out.resolve()
    if options.part:
        checks = PARTS[options.part][0](scale, out)
        (out / f"{options.part}.json").write_text(json.dumps([asdict(one) for one in checks]))
        return
    names = core.parse_names(parser, "--only", options.only.replace(",", ";"), list(PARTS))
    more, end, results = ["--miniature"] * options.miniature, time.monotonic() + TOTAL_SECONDS, {}
    for name in names:  # by importance, as later parts only get the time that is left
        left = max(1.0, min(PARTS[name][1], end - time.monotonic()))
        results[name] = run_part(name, left, out, more)
        text = report(out, versions(scale), results)
    print(text + NOT_PROVEN)
    sys.exit(any(check.passed is False for checks in results.values() for check in checks))


if __name__ == "__main__":
    main()
