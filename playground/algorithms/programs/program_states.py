"""What a program's variable holds after each of its steps, also under a changed meaning of its symbols.

The programs are those of the small world: a last function whose one argument, `items`, `words` or `text`, every step
gives a new value. A step is a statement that does so.
"""
from __future__ import annotations

import ast
import re
from typing import Any, NamedTuple

from playground.algorithms.programs.interpreter import Interpreter, NotInterpreted

EXAMPLES: dict[str, Any] = {  # the argument that a program is interpreted on
    "items": [12, 5, 30, 7, 7, 18], "words": ["Lamp", "ice", "oven", "key"], "text": "the cat sat on the mat",
}
START = re.compile(r"def \w+\(\w+\):\n")
LINES = 100  # of a program that is read
CHARACTERS = 8_000


class ProgramText(NamedTuple):
    """A program in a text, complete or cut off after a line."""

    tree: ast.Module
    argument: str
    steps: list[tuple[int, int]]  # where each begins and ends in the text, in characters

    def values(self) -> list[Any] | None:
        """The value of the variable after each step, for the example; None if that is not interpreted."""
        return _values(self.tree, self.argument)

    def changed_values(self) -> list[Any] | None:
        """These values if the symbols meant what `ChangedMeaning` says."""
        return _values(ChangedMeaning().visit(ast.parse(ast.unparse(self.tree))), self.argument)


def code_in(text: str) -> tuple[int, str] | None:
    """The first character of the first function of a text, and the longest beginning of lines that is a program."""
    begin = START.search(text)
    lines = text[begin.start():][:CHARACTERS].splitlines(keepends=True)[:LINES] if begin else []
    for count in range(len(lines), 0, -1):
        code = "".join(lines[:count])
        if _parsed(code):
            return text.index(code), code
    return None


def program_in(text: str) -> ProgramText | None:
    """The first program of a text, if its last function takes an argument that `EXAMPLES` has."""
    found = code_in(text)
    tree = _parsed(found[1]) if found else None
    if found is None or tree is None or not all(isinstance(each, ast.FunctionDef) for each in tree.body):
        return None
    function = tree.body[-1]
    if len(function.args.args) != 1 or function.args.args[0].arg not in EXAMPLES:
        return None
    argument = function.args.args[0].arg
    spans = [_span(text, found[0], each) for each in function.body if _changes(each, argument)]
    return ProgramText(tree, argument, spans)


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _changes(statement: ast.stmt, argument: str) -> bool:
    """Whether a statement gives the variable, or an item of it, a value."""
    stored = [node for node in ast.walk(statement) if isinstance(node, (ast.Name, ast.Subscript))
              and isinstance(node.ctx, ast.Store)]
    targets = [node.value if isinstance(node, ast.Subscript) else node for node in stored]
    return any(isinstance(node, ast.Name) and node.id == argument for node in targets)


def _span(text: str, begin: int, node: ast.stmt) -> tuple[int, int]:
    """First character of a node and the one after its last, in the text; ast counts bytes in a line."""
    lines = text[begin:].splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return begin + sum(map(len, lines[:line - 1])) + len(lines[line - 1].encode()[:column].decode(errors="ignore"))

    return place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)


def _values(tree: ast.Module, argument: str) -> list[Any] | None:
    *helpers, function = (each for each in tree.body if isinstance(each, ast.FunctionDef))
    interpreter, found = Interpreter(helpers), []
    variables = {argument: EXAMPLES[argument][:]}
    try:
        for statement in function.body:
            if not isinstance(statement, (ast.Return, ast.If)):  # an early result for empty input is none of an example
                interpreter.run(statement, variables)
            if _changes(statement, argument):
                found.append(_checked(variables[argument]))
    except NotInterpreted:
        return None
    return found


def _checked(value: Any) -> Any:
    """A copy of a value that is a text or a list of numbers or words. Raises NotInterpreted for others."""
    if isinstance(value, str) or isinstance(value, list) and (
        all(type(each) is int for each in value) or all(isinstance(each, str) for each in value)
    ):
        return value[:]
    raise NotInterpreted("neither a text nor a list of numbers or words")


class ChangedMeaning(ast.NodeTransformer):
    """Another meaning of the same symbols: < and > trade places, so do == and !=, in and not in, + and - of numbers,
    the two ends of a slice, min and max, upper and lower.
    """

    COMPARISONS: dict[type, type] = {
        ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.In: ast.NotIn, ast.NotIn: ast.In,
    }
    NAMES = {"min": "max", "max": "min", "upper": "lower", "lower": "upper"}

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        node.ops = [self.COMPARISONS.get(type(op), type(op))() for op in node.ops]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in (ast.Add, ast.Sub) and _of_number(node.left) and _of_number(node.right):
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return node

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        node.lower, node.upper = node.upper, node.lower
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.NAMES.get(node.id, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self.NAMES.get(node.attr, node.attr)
        return node


def _of_number(node: ast.expr) -> bool:
    """Whether an operand is a number by the names of the small world: x, y, i, or a constant."""
    if isinstance(node, ast.Name):
        return node.id in ("x", "y", "i")
    return isinstance(node, ast.Constant) and type(node.value) is int
