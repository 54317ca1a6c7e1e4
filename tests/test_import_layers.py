"""Who may import whom: tools <- pictures <- config <- {distributed, models, data} <- diloco <- {components, planner}
<- saved_model <- {export, generation} <- trainer <- {train, launch, generate, validate, report, plan}."""

import ast
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "torchtitan_diloco"
LAYERS = [
    {"tools"},
    {"pictures"},
    {"config"},
    {"distributed", "models", "data"},
    {"diloco"},
    {"components", "planner"},
    {"saved_model"},
    {"export", "generation"},
    {"trainer"},
    {"train", "launch", "generate", "validate", "report", "plan"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
REMOTE_CODE = sorted((PACKAGE / "export/remote_code").glob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(source: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source_module = "." * node.level + (node.module or "")
            modules.add(source_module)
            modules.update(f"{source_module}.{alias.name}" for alias in node.names)
    return modules


def violations(part: str, source: str) -> list[str]:
    found = []
    for module in sorted(imported_modules(source)):
        assert not module.startswith("."), "imports are absolute"
        if not module.startswith("torchtitan_diloco."):
            continue
        target = module.split(".")[1]
        if target == part or target not in LEVEL:
            continue
        if LEVEL[target] >= LEVEL[part] and not (
            LEVEL[target] == LEVEL[part] and part == "components"
        ):
            found.append(f"{part} imports {module}")
    return found


@pytest.mark.parametrize("path", [path for path in FILES if path not in REMOTE_CODE], ids=relative)
def test_imports_never_go_upward(path: Path) -> None:
    assert part_of(path) in LEVEL, "a new part of the package: say in which layer it is"
    assert violations(part_of(path), path.read_text()) == []


@pytest.mark.parametrize("path", REMOTE_CODE, ids=relative)
def test_an_export_carries_no_import_of_this_package(path: Path) -> None:
    """Beside their like, which lie in the same folder, these files find torch and transformers only."""
    roots = {
        module.split(".")[0] or module.split(".")[1]
        for module in imported_modules(path.read_text())
    }
    assert roots <= {"typing", "torch", "transformers", *(other.stem for other in REMOTE_CODE)}


def test_the_check_sees_a_violation() -> None:
    assert violations("models", "from torchtitan_diloco.components.loss import chunked_loss")
    assert violations("data", "import torchtitan_diloco.models.chinchilla.model")
    assert not violations("components", "from torchtitan_diloco.data.loader import IGNORE_INDEX")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_public_names_of_torch(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            assert not (isinstance(root, ast.Name) and root.id in {"torch", "dist", "nn", "F"}), (
                ast.unparse(node)
            )
    for module in imported_modules(path.read_text()):
        if module.startswith("torch."):
            assert not any(part.startswith("_") for part in module.split(".")), module


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_printing_the_configuration_needs_no_torch() -> None:
    """`--help` and `--print-config` must answer at once."""
    import subprocess
    import sys

    code = "import sys, torchtitan_diloco.config, torchtitan_diloco.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
