"""Check imports between packages, that torch is used by public names, and lengths."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "torchtitan_diloco"
MAY_IMPORT = {
    "utils": set(),
    "diloco": {"utils"},
    "config": {"utils", "diloco.config", "diloco.fields", "islands.config"},
    "islands": {"utils", "diloco"},
    "distributed": {"utils", "config", "diloco"},
    "models": {"utils", "config"},
    "data": {"utils", "config"},
    "components": {"utils", "config", "diloco", "distributed", "models"},
    "planner": {"utils", "config", "diloco", "models", "components"},
    "export": {"utils", "config", "diloco", "distributed", "models", "data", "components"},
    "report": {"utils", "config", "components", "planner"},
}
"""Commands and the trainer, which are all other modules, may import everything."""
PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
FILES = sorted(PACKAGE.rglob("*.py"))
REMOTE_CODE = sorted((PACKAGE / "export/remote_code").glob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_modules(source: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            modules.update(f"{module}.{alias.name}" for alias in node.names)
    return modules


def violations(part: str, source: str) -> list[str]:
    found = []
    for module in sorted(imported_modules(source)):
        assert not module.startswith("."), "imports are absolute"
        name = module.removeprefix("torchtitan_diloco.")
        allowed = {part} | MAY_IMPORT.get(part, set())
        if name == module or part not in MAY_IMPORT or name == "__version__":
            continue
        if not any(name == known or name.startswith(f"{known}.") for known in allowed):
            found.append(f"{part} imports {module}")
    return found


@pytest.mark.parametrize("path", [path for path in FILES if path not in REMOTE_CODE], ids=relative)
def test_imports_follow_the_layers(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert violations(part, path.read_text()) == []


@pytest.mark.parametrize("path", REMOTE_CODE, ids=relative)
def test_exported_code_imports_only_torch_and_transformers(path: Path) -> None:
    roots = {module.strip(".").split(".")[0] for module in imported_modules(path.read_text())}
    assert roots <= {"typing", "torch", "transformers", *(other.stem for other in REMOTE_CODE)}


def test_the_check_sees_a_violation() -> None:
    assert violations("models", "from torchtitan_diloco.components.loss import chunked_loss")
    assert violations("diloco", "from torchtitan_diloco.config.schema import Config")
    assert violations("config", "import torchtitan_diloco.diloco.streaming")
    assert not violations("config", "from torchtitan_diloco.diloco.config import Link")
    assert not violations("trainer", "from torchtitan_diloco.planner import search")


SCHEDULE = "torchtitan_diloco.diloco.schedule."


def test_the_rules_of_islands_are_pure() -> None:
    """They have no I/O and no clock, so that a simulation can test them."""
    allowed = {"collections", "dataclasses", "enum", "hashlib", "math", "msgspec", "operator"}
    allowed |= {"statistics", "typing"}
    for name in ("records", "log", "members", "rules"):
        for module in imported_modules((PACKAGE / f"islands/{name}.py").read_text()):
            own = module.startswith(("torchtitan_diloco.islands.", SCHEDULE))
            assert own or module.split(".")[0] in allowed, f"islands/{name}.py imports {module}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_public_names_of_torch(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            private = isinstance(root, ast.Name) and root.id in {"torch", "dist", "nn", "F"}
            assert not private or node.attr.startswith("__"), ast.unparse(node)
    for module in imported_modules(path.read_text()):
        if module.startswith("torch."):
            assert not any(part.startswith("_") for part in module.split(".")), module


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_unpickled(path: Path) -> None:
    """Objects from other ranks and from files must not run code."""
    source = path.read_text()
    calls = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not calls & PICKLING
    if relative(path) != "components/checkpoint_schema.py":  # which restricts the classes
        assert not imported_modules(source) & {"pickle", "marshal", "shelve", "dill"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < 80, f"{node.name} is too long"


def test_reading_a_configuration_does_not_import_torch() -> None:
    """Keep `--help` and `--print-config` fast."""
    code = "import sys, torchtitan_diloco.config, torchtitan_diloco.launch as _; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
