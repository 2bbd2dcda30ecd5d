"""Keep the house's one rule: leaves import the core and nothing of each other, the core imports no leaf."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = "core_kernels"
LEAVES = {"gnn_parallel", "gnn_comm", "gnn_eval", "recsys_embed", "autopar", "elastic_train"}


def imported_roots(tree: ast.AST) -> list[tuple[int, str]]:
    """List (line, top-level module) of every import statement."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module.split(".")[0]))
    return found


def violations(root: Path) -> list[str]:
    """List every import that crosses from one leaf into another, or from the core into a leaf."""
    wrong = []
    for source in sorted(root.glob("packages/*/src/*/**/*.py")):
        home = source.relative_to(root).parts[3]
        for line, module in imported_roots(ast.parse(source.read_text())):
            if module in LEAVES and module != home:
                wrong.append(f"{source.relative_to(root)}:{line}: {home} imports {module}")
    return wrong


if __name__ == "__main__":
    found = violations(ROOT)
    print("\n".join(found) or "imports: every leaf imports the core alone")
    sys.exit(bool(found))
