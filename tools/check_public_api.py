"""Check the public names of every package against the committed lists, and that each has a docstring.

    python tools/check_public_api.py            # compare
    python tools/check_public_api.py --write    # accept what is there now

A package's public names are those in ``__all__`` of its top module and of its public sub-packages. A list is one name
per line in ``tools/public_api/<package>.txt``, so that a removed or added name shows in a review. Sources are read, not
imported: the check needs nothing installed.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def public_modules(package: Path) -> list[Path]:
    """Return the ``__init__.py`` of a package and of its public sub-packages."""
    inits = sorted(package.rglob("__init__.py"))
    return [init for init in inits if not any(part.startswith("_") for part in init.parent.relative_to(package).parts)]


@cache
def parse(path: Path) -> ast.Module:
    """Parse a source once."""
    return ast.parse(path.read_text())


def exported_names(path: Path) -> list[str]:
    """Return ``__all__`` of a module; empty without one."""
    for node in parse(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return [element.value for element in node.value.elts if isinstance(element, ast.Constant)]
    return []


def module_path(source_root: Path, dotted: str) -> Path | None:
    """Return the file of a module of this repository, or None."""
    base = source_root.joinpath(*dotted.split("."))
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.exists():
            return candidate
    return None


def find_definition(root: Path, path: Path, name: str) -> ast.AST | Path | None:
    """Follow imports to where a name is defined: a class, function, assignment, or the file of a module."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _follow_import(root, path, node.module, alias.name)
    return None


def _follow_import(root: Path, importer: Path, module: str, name: str) -> ast.AST | Path | None:
    for source in sorted(root.glob("packages/*/src")):
        home = module_path(source, module)
        if home is not None and home != importer and (found := find_definition(root, home, name)) is not None:
            return found
        if (submodule := module_path(source, f"{module}.{name}")) is not None:
            return submodule
    return None


def problems(root: Path, lists: Path, write: bool = False) -> list[str]:
    """List names that came, went, or have no docstring; with ``write`` the lists are made anew first."""
    found = []
    for package in sorted(root.glob("packages/*/src/*")):
        if not (package / "__init__.py").exists():
            continue
        names = []
        for module in public_modules(package):
            dotted = ".".join(module.parent.relative_to(package.parent).parts)
            for name in exported_names(module):
                names.append(f"{dotted}.{name}")
                if not _is_documented(find_definition(root, module, name)):
                    found.append(f"{dotted}.{name} has no docstring; say what it is where it is defined")
        found += _compare(lists / f"{package.parents[1].name}.txt", sorted(names), write)
    return found


def _is_documented(definition: ast.AST | Path | None) -> bool:
    if isinstance(definition, Path):
        return ast.get_docstring(parse(definition)) is not None
    if isinstance(definition, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(definition) is not None
    return definition is not None  # constants have a comment or a page of their own


def _compare(path: Path, names: list[str], write: bool) -> list[str]:
    if write:
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(names) + "\n")
    committed = path.read_text().split() if path.exists() else []
    remedy = "run python tools/check_public_api.py --write and say so in the changelog"
    gone = [f"{name} is not public any more; {remedy}" for name in committed if name not in names]
    return gone + [f"{name} became public; {remedy}" for name in names if name not in committed]


if __name__ == "__main__":
    faults = problems(ROOT, ROOT / "tools" / "public_api", "--write" in sys.argv[1:])
    print("\n".join(faults) or "public API: names agree with tools/public_api, each has a docstring")
    sys.exit(bool(faults))
