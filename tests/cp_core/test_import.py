"""``import cp_core`` needs torch alone, and the packages import in one direction."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = [
    "transformers",
    "safetensors",
    "pydantic",
    "peft",
    "rich",
    "typer",
    "yaml",
    "huggingface_hub",
    "tokenizers",
    "accelerate",
    "datasets",
    "matplotlib",
    "fla",
    "flash_attn",
    "torch_npu",
    "models",
    "recipes",
    "scripts",
]
LAZY = {"transformers", "fla", "flash_attn", "torch_npu"}  # imported inside a function, each in one file
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({OTHERS!r}))"


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_imports_with_torch_alone() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "cp_core").rglob("*.py"))
    ]
    assert len(modules) > 15
    code = f"""
{BLOCK}
import cp_core
assert not [name for name in cp_core.__all__ if not hasattr(cp_core, name)]
import importlib
for name in {modules!r}:
    importlib.import_module(name)
import torch
local = cp_core.shard_batch({{"input_ids": torch.zeros(1, 5, dtype=torch.int64)}})
q = torch.randn(1, 2, 5, 4)
print(tuple(cp_core.CPAttention(0.5)(q, q, q, local["sequence"]).shape))
try:
    import transformers
except ImportError:
    print("blocked")
"""
    assert _run(code).split("\n")[:2] == ["(1, 2, 5, 4)", "blocked"]


def _imports(path: Path) -> list[tuple[str, bool]]:
    """``(top-level package, inside a function or under TYPE_CHECKING)`` of every import of a file."""
    tree = ast.parse(path.read_text())
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            inner.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[0], node in inner) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(((node.module or "").partition(".")[0], node in inner))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            named = [str(x.value).partition(".")[0] for x in node.args[:1] if isinstance(x, ast.Constant)]
            found += [(name, node in inner) for name in named]
    return found


def _files(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


def test_core_imports_only_the_standard_library_and_torch() -> None:
    lazy: dict[str, set[Path]] = {}
    for path in _files("cp_core"):
        for name, inner in _imports(path):
            if name in sys.stdlib_module_names or name in ("torch", "cp_core"):
                continue
            assert inner, f"{path} imports {name} when it is imported"
            assert name in LAZY, f"{path} imports {name}"
            lazy.setdefault(name, set()).add(path)
    for name, paths in lazy.items():
        assert len(paths) == 1, f"{name} is imported in several files: {paths}"


@pytest.mark.parametrize(
    ("package", "forbidden"), [("cp_core", {"models", "recipes", "scripts"}), ("models", {"recipes", "scripts"})]
)
def test_import_direction(package: str, forbidden: set[str]) -> None:
    bad = [(str(path), name) for path in _files(package) for name, _ in _imports(path) if name in forbidden]
    assert not bad


def test_relative_imports_stay_inside_their_package() -> None:
    for package in ("cp_core", "models", "recipes"):
        for path in _files(package):
            depth = len(path.relative_to(ROOT).parts) - 1  # dots that lead to the package
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, f"{path}:{node.lineno} leaves {package}"
