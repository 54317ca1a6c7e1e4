"""Write the functions and methods of the standard library as a corpus of short documents.

    .venv/bin/python -m benchmarks.functions [--out outputs/functions.jsonl]

Each is there once. They are shuffled, so that a document says nothing about the next one.
"""

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from benchmarks import core
from torchtitan_diloco.data.text import TEXT_FIELD, standard_library


def functions_of(source: str) -> Iterator[str]:
    """Yield the source of each function of a module, and of each method of its classes."""
    lines = source.splitlines()
    module = ast.parse(source)
    classes = [node.body for node in module.body if isinstance(node, ast.ClassDef)]
    for body in [module.body, *classes]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/functions.jsonl"))
    options = parser.parse_args()
    files = standard_library(Path(sysconfig.get_path("stdlib")))
    # Some functions are copies of others, of which none may be held out.
    documents = list(
        dict.fromkeys(
            document
            for file in files
            for document in functions_of(file.read_text(encoding="utf-8", errors="replace"))
        )
    )
    random.Random(0).shuffle(documents)
    rows = [json.dumps({TEXT_FIELD: document}) + "\n" for document in documents]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(rows), encoding="utf-8")
    characters = sum(map(len, documents)) / len(documents)
    print(f"wrote {options.out}: {len(documents):,} documents of {characters:.0f} characters")


if __name__ == "__main__":
    main()
