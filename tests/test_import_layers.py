"""Check imports, names of other packages, and the lengths of files and functions."""

import ast
from collections.abc import Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco.components.common_facts import COMPUTES
from torchtitan_diloco.diloco.agreement import PLACES

PACKAGE = REPOSITORY / "torchtitan_diloco"
MAY_IMPORT = {
    "base": set(),
    "diloco": {"base"},
    "store": {"base"},
    "islands": {"base", "diloco", "store"},
    "islands.rules": {"base", "diloco.formats", "diloco.modes", "diloco.schedule"},
    "config": {"base", "diloco.config", "islands.config"},
    "distributed": {"base", "diloco", "config"},
    "models": {"base", "config"},
    "data": {"base", "config"},
    "components": {
        "base",
        "diloco",
        "store",
        "islands.traffic",
        "config",
        "distributed",
        "models",
        "data",
    },
    "export": {"base", "diloco", "config", "distributed", "models", "data", "components"},
    "report": {"base", "islands", "store.location", "config", "components"},
    "planner": {
        "base",
        "diloco",
        "islands.rules",
        "config",
        "models",
        "data",
        "components",
        "report",
    },
    "diagnosis": {"base", "diloco", "config", "distributed", "components", "planner.ladder"},
    "course": {"base", "diloco", "config", "distributed", "data", "components"},
    "island_course": {
        "base",
        "diloco",
        "islands",
        "config",
        "distributed",
        "data",
        "components",
        "course",
    },
}
"""Maps each layer to what it may import beside itself: layers that stand above it."""
ABOVE = ("trainer", "launching", "machines", "train", "cli", "__main__")
"""Layers and files that may import all of `MAY_IMPORT`, and those of this list before them."""
PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
FILES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(parsed: ast.Module) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            modules.update(f"{module}.{alias.name}" for alias in node.names)
    return modules


def layer_of(path: Path) -> str:
    """Return the layer of a file: the innermost one that has a line of its own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    layers = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((layer for layer in layers if layer in MAY_IMPORT), parts[0])


def allowed_for(layer: str) -> set[str]:
    if layer in MAY_IMPORT:
        return {layer, "__version__", *MAY_IMPORT[layer]}
    if layer == "__init__":
        return set()
    return {"__version__", *MAY_IMPORT, *ABOVE[: ABOVE.index(layer) + 1]}


def test_imports_follow_the_layers() -> None:
    wrong = []
    for path in FILES:
        allowed = allowed_for(layer_of(path))
        for module in imported_modules(tree(path)):
            assert not module.startswith("."), "imports are absolute"
            name = module.removeprefix("torchtitan_diloco.")
            if name == module:
                continue
            if not any(name == known or name.startswith(f"{known}.") for known in allowed):
                wrong.append(f"{relative(path)} imports {module}")
    assert wrong == []


@cache
def import_graph() -> dict[str, set[str]]:
    """Return what each module imports. A package's own file, which only names what others import,
    counts as a module like others."""
    modules = {relative(path).removesuffix(".py").replace("/", "."): path for path in FILES}
    graph = dict[str, set[str]]()
    for name, path in modules.items():
        body = [node for node in tree(path).body if not isinstance(node, ast.If)]  # types only
        names = imported_modules(ast.Module(body, [])) if not name.endswith("__init__") else set()
        named = {one.removeprefix("torchtitan_diloco.") for one in names}
        graph[name] = {one if one in modules else one.rpartition(".")[0] for one in named}
    return graph


def test_no_imports_are_circular() -> None:
    TopologicalSorter(import_graph()).prepare()  # raises CycleError


def test_ranks_compare_all_code_that_computes() -> None:
    """All that the trainer imports, directly or not, is compared at the start or only looks on."""
    looks_on = {"diagnosis", "planner"}
    graph = import_graph()
    found = set[str]()
    following = {"trainer"}
    while following:
        found |= following
        following = {one for name in following for one in graph[name] if one in graph} - found
    own = {relative(path).split("/")[0].removesuffix(".py") for path in FILES}
    named = {one.partition(".")[0] for name in found for one in (name, *graph[name])} & own
    by_the_outer_loop = {place.name for place in PLACES}
    assert named - looks_on - by_the_outer_loop == {one.removesuffix(".py") for one in COMPUTES}


PURE = {"collections", "dataclasses", "enum", "hashlib", "math", "msgspec", "operator", "re"}
PURE |= {"statistics", "typing", "zlib"}
"""Packages without I/O, clocks and chance."""


ERRORS = {
    f"torchtitan_diloco.base.user.{name}" for name in ("UserError", "PeersLostError", "FENCED")
}


def test_the_rules_of_islands_are_pure() -> None:
    """A simulation can test them, as they have no I/O and no clock."""
    own = (
        "torchtitan_diloco.islands.rules.",
        "torchtitan_diloco.base.untrusted.",
        "torchtitan_diloco.diloco.schedule.",
        "torchtitan_diloco.diloco.formats.",
        "torchtitan_diloco.diloco.modes.",
    )
    for path in (PACKAGE / "islands/rules").glob("*.py"):
        for module in imported_modules(tree(path)):
            pure = module.startswith(own) or module in ERRORS
            assert pure or module.split(".")[0] in PURE, f"{path.name} imports {module}"


PUBLIC = {"os._exit"}
"""Documented names of the standard library that look private."""


def private_names(parsed: ast.Module) -> list[str]:
    """Return the private names of other packages that a module uses, such as `torch._C`."""
    found = list[str]()
    modules = dict[str, str]()  # of each name, what was imported under it
    for node in ast.walk(parsed):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            imported = origin + alias.name
            if imported.startswith("torchtitan_diloco"):
                continue
            if any(is_private(part) for part in imported.split(".")):
                found.append(imported)
            if alias.asname or origin:
                modules[alias.asname or alias.name] = imported
            else:  # `import a.b` binds a
                modules[imported.split(".")[0]] = imported.split(".")[0]
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root, _, rest = ast.unparse(node).partition(".")
            if root in modules:
                found.append(f"{modules[root]}.{rest}")
    return [name for name in found if name not in PUBLIC]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("import atexit\natexit._run_exitfuncs()", "atexit._run_exitfuncs"),
        ("import torch.nn as nn\nprint(nn.modules._functions)", "torch.nn.modules._functions"),
        ("import torch.distributed\ntorch._C._log_api_usage_once", "torch._C._log_api_usage_once"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch import distributed as d\nd._make()", "torch.distributed._make"),
        ("from threading import _shutdown", "threading._shutdown"),
        ("import os\nos._exit(os.__name__)", None),
        ("from torchtitan_diloco import user\nuser._relative", None),
        ("class A:\n    def f(self):\n        self._a = 1", None),
    ],
)
def test_private_names_are_found(code: str, private: str | None) -> None:
    assert (private in private_names(ast.parse(code))) == (private is not None)


def test_only_public_names_of_other_packages() -> None:
    assert [name for path in FILES for name in private_names(tree(path))] == []


UNPICKLES = {"export/dcp.py"}
"""Files that may, with a list of classes: tests/export/test_torchtitan.py tries others."""


def test_nothing_is_unpickled() -> None:
    """Data from other ranks and from files must not run code."""
    for path in (path for path in FILES if relative(path) not in UNPICKLES):
        nodes = ast.walk(tree(path))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not names & PICKLING, relative(path)
        unsafe = {"pickle", "marshal", "shelve", "dill"}
        assert not imported_modules(tree(path)) & unsafe, relative(path)


LONG_FUNCTIONS = {"run", "join_world"}
"""Functions that may exceed 60 lines, as they are read from top to bottom: the training loop, and
the steps in which a process joins the others."""


def packs_statements(node: ast.Assign) -> bool:
    """Return whether an assignment is several in one: `a = b = x`, or `a, b = x, y` where no value
    reads a name that it sets, as a swap does."""
    target, *others = node.targets
    value = node.value
    if others:
        return True
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    is_starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
    names = {ast.unparse(part) for part in target.elts}
    reads = {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}
    return not is_starred and not names & reads


def is_explained(node: ast.Assign, body: Sequence[ast.stmt]) -> bool:
    """Return whether a docstring follows, which explains several constants together."""
    following = body[body.index(node) + 1 :][:1]
    return any(
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for statement in following
    )


def test_one_statement_is_on_a_line() -> None:
    for folder in ("torchtitan_diloco", "benchmarks", "tests", "examples", "docs"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            nodes = ast.walk(tree(path))
            bodies = [getattr(node, field, []) for node in nodes for field in ("body", "orelse")]
            for body in (body for body in bodies if isinstance(body, list)):
                for node in body:
                    if isinstance(node, ast.Assign) and not is_explained(node, body):
                        where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                        assert not packs_statements(node), f"{where}: give each its own line"


def test_files_and_functions_stay_short() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 500, relative(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                most = 80 if node.name in LONG_FUNCTIONS else 60
                assert lines <= most, f"{relative(path)}: {node.name} is too long"
