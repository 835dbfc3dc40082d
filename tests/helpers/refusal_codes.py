"""The codes of the refusals that a folder's source can give."""

import ast
from collections.abc import Iterator
from pathlib import Path

RECORDS = ("Refusal", "Untraced", "NearMiss")


def codes_in(folder: Path) -> set[str]:
    """Every code written down in the Python files of `folder`, which is where it may be: the first argument."""
    return {code for path in sorted(folder.rglob("*.py")) for code in _codes(ast.parse(path.read_text("utf-8")))}


def _codes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RECORDS:
            code = node.args[0]
            if isinstance(code, ast.Constant):
                yield str(code.value)
            else:  # handed on from another refusal, with a sentence of its own
                assert ast.unparse(code).endswith(".code"), ast.unparse(node)
