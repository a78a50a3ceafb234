"""The allowlist for the text of a program, checked on its syntax tree before it is compiled.

A program computes with numbers, strings, lists, tuples, dicts and sets, in functions, loops, conditions and
comprehensions. It defines no classes and matches no patterns, and the only attributes it can name are methods of those
types that return plain values. So none of its expressions can reach a class, a frame, a module or the namespace of a
function outside the program. `str.format` and `str.format_map` are excluded because a format string can access
attributes.
"""
from __future__ import annotations

import ast
import builtins

CHARACTERS = 20_000  # of a program
NODES = 10_000  # of its syntax tree

BUILTINS = frozenset("""
    abs all any bool chr dict divmod enumerate filter float frozenset hex int isinstance len list map max min ord pow
    range repr reversed round set sorted str sum tuple zip
    ArithmeticError AttributeError Exception IndexError KeyError LookupError OverflowError RecursionError TypeError
    ValueError ZeroDivisionError
""".split())

METHODS = frozenset("""
    capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit islower
    isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex
    rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title translate upper zfill
    append clear copy extend insert pop remove reverse sort
    fromkeys get items keys popitem setdefault update values
    add difference difference_update discard intersection intersection_update isdisjoint issubset issuperset
    symmetric_difference symmetric_difference_update union
    bit_count bit_length is_integer
""".split())

NODE_TYPES = frozenset("""
    Module FunctionDef Lambda arguments arg Return Delete Assign AugAssign AnnAssign For While If Raise Try
    ExceptHandler Assert Global Nonlocal Expr Pass Break Continue
    BoolOp And Or NamedExpr BinOp Add Sub Mult Div Mod Pow LShift RShift BitOr BitXor BitAnd FloorDiv
    UnaryOp Invert Not UAdd USub IfExp Dict Set List Tuple ListComp SetComp DictComp GeneratorExp comprehension
    Compare Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn Call keyword JoinedStr FormattedValue Constant
    Attribute Subscript Starred Name Slice Load Store Del
""".split())

CONSTANTS = (str, int, float, bool, type(None))


class NotAllowed(ValueError):
    """A program contains something that is not on the lists."""


def read(code: str) -> ast.Module:
    """Parse and check a program.

    Raises NotAllowed, and the parser's SyntaxError, ValueError, MemoryError and RecursionError.
    """
    if len(code) > CHARACTERS:
        raise NotAllowed(f"more than {CHARACTERS} characters")
    tree = ast.parse(code)
    check(tree)
    return tree


def check(tree: ast.AST) -> None:
    """Raise NotAllowed for the first node that is not on the lists."""
    nodes = list(ast.walk(tree))
    if len(nodes) > NODES:
        raise NotAllowed(f"more than {NODES} nodes")
    readable = BUILTINS | {name for node in nodes for name in _bound(node)}
    for node in nodes:
        _check_node(node)
        if isinstance(node, ast.Name) and node.id not in readable:
            raise NotAllowed(f"the name {node.id}")


def namespace() -> dict[str, object]:
    """The globals of a program: only the allowed builtins."""
    return {"__builtins__": {name: getattr(builtins, name) for name in BUILTINS}}


def _bound(node: ast.AST) -> list[str]:
    """Names that a node binds."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, (ast.FunctionDef, ast.ExceptHandler)):
        return [node.name] if node.name else []
    return [node.arg] if isinstance(node, ast.arg) else []


def _check_node(node: ast.AST) -> None:
    kind = type(node).__name__
    if kind not in NODE_TYPES:
        raise NotAllowed(kind)
    if isinstance(node, ast.Constant):
        _check_constant(node)
    else:
        _check_identifiers(node)
    if isinstance(node, ast.Attribute) and (node.attr not in METHODS or not isinstance(node.ctx, ast.Load)):
        raise NotAllowed(f"the attribute {node.attr}")
    if getattr(node, "decorator_list", []):
        raise NotAllowed("a decorator")


def _check_constant(node: ast.Constant) -> None:
    if type(node.value) not in CONSTANTS:
        raise NotAllowed(f"a constant of type {type(node.value).__name__}")


def _check_identifiers(node: ast.AST) -> None:
    """Raise NotAllowed for an identifier with two consecutive underscores, wherever the grammar allows one."""
    for _, value in ast.iter_fields(node):
        if any(isinstance(name, str) and "__" in name for name in (value if isinstance(value, list) else [value])):
            raise NotAllowed("a name with two underscores")
