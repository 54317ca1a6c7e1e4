"""Check imports between packages, names of torch, and the lengths of files and functions."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "torchtitan_diloco"
BASE = {"log", "hardware"}
"""Every module may import them."""
MAY_IMPORT = {
    "log": set(),
    "hardware": {"log"},
    "diloco": set(),
    "store": set(),
    "config": {"diloco.config", "diloco.fields", "islands.config"},
    "islands": {"diloco", "store"},
    "distributed": {"config", "diloco"},
    "models": {"config"},
    "data": {"config", "diloco.fields"},
    "components": {"config", "diloco", "distributed", "models", "data"},
    "diagnosis": {"config", "diloco", "distributed", "components", "planner.ladder"},
    "planner": {"config", "diloco", "islands", "models", "components", "report"},
    "export": {"config", "diloco", "distributed", "models", "data", "components"},
    "report": {"config", "components", "islands"},
}
"""Commands and the trainer, which are all other modules, may import everything."""
VITALS = "torchtitan_diloco.diloco.vitals."
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


def test_imports_follow_the_layers() -> None:
    found = []
    for path in FILES:
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = {part} | (set() if part in BASE else BASE) | MAY_IMPORT.get(part, set())
        for module in imported_modules(tree(path)):
            assert not module.startswith("."), "imports are absolute"
            name = module.removeprefix("torchtitan_diloco.")
            if name == module or part not in MAY_IMPORT or name == "__version__":
                continue
            if not any(name == known or name.startswith(f"{known}.") for known in allowed):
                found.append(f"{relative(path)} imports {module}")
    assert found == []


def test_no_imports_are_circular() -> None:
    """A package's own file, which only names what others import, counts as a module like others."""
    modules = {relative(path).removesuffix(".py").replace("/", "."): path for path in FILES}
    graph = dict[str, set[str]]()
    for name, path in modules.items():
        body = [node for node in tree(path).body if not isinstance(node, ast.If)]  # types only
        names = imported_modules(ast.Module(body, [])) if not name.endswith("__init__") else set()
        named = {one.removeprefix("torchtitan_diloco.") for one in names}
        graph[name] = {one if one in modules else one.rpartition(".")[0] for one in named}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_rules_of_islands_are_pure() -> None:
    """A simulation can test them, as they have no I/O and no clock."""
    allowed = {"collections", "dataclasses", "enum", "hashlib", "math", "msgspec", "operator"}
    allowed |= {"statistics", "typing"}
    own = "torchtitan_diloco.islands.", "torchtitan_diloco.diloco.schedule.", VITALS
    for name in ("records", "log", "members", "rounds", "ledger", "machine", "actions"):
        for module in imported_modules(tree(PACKAGE / f"islands/{name}.py")):
            pure = module.startswith(own) or module == "torchtitan_diloco.log.UserError"
            pure = pure or module.split(".")[0] in allowed
            assert pure, f"islands/{name}.py imports {module}"


def private_names(parsed: ast.Module) -> list[str]:
    """Return the private names of torch that a module uses."""
    found = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            of_torch = isinstance(root, ast.Name) and root.id in {"torch", "dist", "nn", "F"}
            if of_torch and not node.attr.startswith("__"):
                found.append(ast.unparse(node))
    modules = [one for one in imported_modules(parsed) if one.startswith("torch.")]
    return found + [one for one in modules if any(part[0] == "_" for part in one.split("."))]


def test_only_public_names_of_torch() -> None:
    assert [name for path in FILES for name in private_names(tree(path))] == []


def test_nothing_is_unpickled() -> None:
    """Data from other ranks and from files must not run code."""
    for path in FILES:
        nodes = ast.walk(tree(path))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not names & PICKLING, relative(path)
        unsafe = {"pickle", "marshal", "shelve", "dill"}
        assert not imported_modules(tree(path)) & unsafe, relative(path)


LONG_FUNCTIONS = {"run", "join_world"}
"""Functions that may exceed 60 lines, as they are read from top to bottom: the training loop, and
the steps in which a process joins the others."""


def test_files_and_functions_stay_short() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, relative(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                most = 70 if node.name in LONG_FUNCTIONS else 60
                assert lines <= most, f"{relative(path)}: {node.name} is too long"
