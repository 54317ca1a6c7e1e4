"""Count what one has to know to own this code: `.venv/bin/python .ci/counts.py`.

Fewer is better. `tests/trips.py` follows the calls of a run for the last rows.
"""

import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "torchtitan_diloco"
sys.path.insert(0, str(REPOSITORY))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported_by(name: str) -> set[str]:
    """Return the modules of the package that a module imports when it is imported itself."""
    imported = set[str]()
    pending = list[ast.AST](TREES[name].body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue  # imported when it is called
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        pending += ast.iter_child_nodes(node)
    own = {one.removeprefix("torchtitan_diloco.") for one in imported}
    return own & MODULES.keys()


def closure(*names: str) -> set[str]:
    """Return these modules, and what they import, directly or not."""
    known = set[str]()
    pending = set(names)
    while pending:
        known |= pending
        pending = set[str]().union(*map(imported_by, pending)) - known
    return known


def classes_in(names: set[str]) -> int:
    nodes = (node for name in names for node in ast.walk(TREES[name]))
    return sum(isinstance(node, ast.ClassDef) for node in nodes)


def lines_by_folder() -> dict[str, int]:
    """Return the lines of each folder of the package, and of the files that lie at its root."""
    lines: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        folder, *below = path.relative_to(PACKAGE).parts
        name = folder if below else "the root"
        lines[name] = lines.get(name, 0) + path.read_text().count("\n")
    return dict(sorted(lines.items()))


def process_groups() -> int:
    """Return the process groups that `join_world` creates for a run of several workers."""
    (join,) = (
        node
        for node in TREES["distributed.world"].body
        if isinstance(node, ast.FunctionDef) and node.name == "join_world"
    )
    creates = {"init_process_group", "_own_group", "_watch_peers"}
    calls = (node.func for node in ast.walk(join) if isinstance(node, ast.Call))
    return sum(ast.unparse(call).rpartition(".")[2] in creates for call in calls)


def density() -> dict[str, float]:
    """Return what makes code hard to read, per 1,000 lines of the package."""
    lines = sum(path.read_text().count("\n") for path in MODULES.values())
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    packed = sum(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
        for node in nodes
    )
    conditional = sum(isinstance(node, ast.IfExp) for node in nodes)
    kinds = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    comprehensions = sum(isinstance(node, kinds) for node in nodes)
    vague = sum(
        isinstance(node, ast.Name | ast.arg)
        and (node.id if isinstance(node, ast.Name) else node.arg) in ("one", "found", "own")
        and not isinstance(getattr(node, "ctx", None), ast.Load)
        for node in nodes
    )
    return {
        "lines of the package": lines,
        "assignments of several values at once, per 1,000 lines": 1000 * packed / lines,
        "conditional expressions, per 1,000 lines": 1000 * conditional / lines,
        "comprehensions, per 1,000 lines": 1000 * comprehensions / lines,
        "names that say nothing (one, found, own)": vague,
    }


def main() -> None:
    from torchtitan_diloco.config import Config
    from torchtitan_diloco.config.schema import flat_settings

    streaming = closure("diloco.streaming")
    counts: dict[str, float] = {
        "modules behind StreamingDiLoCo": len(streaming),
        "classes behind StreamingDiLoCo": classes_in(streaming),
        "modules that components/loss.py imports": len(closure("components.loss")) - 1,
        "modules that a plain run imports": len(closure("train", "trainer")),
        "process groups of a run": process_groups(),
        "settings": len(flat_settings(Config())),
        "files at the root of the package": len([*PACKAGE.glob("*.py")]),
        **{f"lines in {name}": count for name, count in lines_by_folder().items()},
        **density(),
    }
    if "--trips" in sys.argv[1:]:
        from tests.trips import follow

        counts |= {f"files of the trip: {name}": len(files) for name, files in follow().items()}
    for name, count in counts.items():
        print(f"{count:>10,.0f}  {name}")


if __name__ == "__main__":
    main()
