"""An allow-list in front of the scorers that evaluate the answer as Python.

The cage keeps what such an answer does inside; this keeps it from happening at all, since code that runs in the same
interpreter as its own scorer could hand itself any reward. Answers beyond the list are refused, score 0 and are counted.

- ``literal`` (scorers that call ``eval``): numbers, texts, lists, tuples, sets, dicts, plain names, sums.
- ``expression`` (scorers that call sympy's ``parse_expr``): numbers, names, arithmetic, and calls of common functions.

Text that is not Python passes for ``literal`` (``eval`` refuses it too, after the comparison that makes an answer right) and is
merely wrong for ``expression``, because sympy rewrites the text before it evaluates it.
"""

from __future__ import annotations

import ast

GRAMMARS = {
    "binary_matrix": "literal",
    "n_queens": "literal",
    "spiral_matrix": "literal",
    "string_insertion": "literal",
    "countdown": "expression",
    "intermediate_integration": "expression",
    "polynomial_multiplication": "expression",
    "puzzle24": "expression",
    "simple_integration": "expression",
}
REVIEWED = frozenset({"bitwise_arithmetic", "codeio", "number_sorting"})
"""Tasks whose module evaluates its own data (problem or reference) but never the answer."""
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "exp", "log", "ln", "sqrt", "Abs", "abs",
})  # fmt: skip
_SUM = (ast.Expression, ast.UnaryOp, ast.BinOp, ast.Constant, ast.Name, ast.Load, ast.Add, ast.Sub, ast.UAdd, ast.USub)
_LISTS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_FORMULA = (*_SUM, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod)
_MAX_LENGTH = 20_000


class Forbidden(Exception):
    """The answer holds something that may not be evaluated."""


class NotAnExpression(ValueError):
    """The answer is not a formula."""


def check(task: str, text: str) -> None:
    """Raises Forbidden or NotAnExpression if ``task`` evaluates answers and this one is not on the list."""
    grammar = GRAMMARS.get(task)
    if grammar is None:
        return
    if len(text) > _MAX_LENGTH:
        raise Forbidden(f"{len(text)} characters to evaluate")
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        if grammar == "literal":
            return
        raise NotAnExpression(f"not a formula: {text[:60]!r}") from e
    nodes = list(ast.walk(tree))
    for node in nodes:
        _check_node(node, grammar)
    for node in nodes:
        if grammar == "expression" and isinstance(node, _LISTS):
            raise NotAnExpression(f"not a formula: {type(node).__name__}")


def _check_node(node: ast.AST, grammar: str) -> None:
    if isinstance(node, ast.Name) and node.id.startswith("__"):
        raise Forbidden(f"name {node.id[:40]!r}")
    if grammar == "literal":
        if not isinstance(node, _SUM + _LISTS):
            raise Forbidden(type(node).__name__)
        return
    if isinstance(node, ast.Call):
        if not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords):
            raise Forbidden(f"call of {ast.unparse(node.func)[:40]!r}")
    elif not isinstance(node, _FORMULA + _LISTS):
        raise Forbidden(type(node).__name__)
    elif isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
        raise Forbidden(f"constant {str(node.value)[:40]!r}")


def knows(task: str) -> bool:
    """Whether the task's scorer has been read: what it evaluates is either on a list above or not the answer."""
    return task in GRAMMARS or task in REVIEWED
