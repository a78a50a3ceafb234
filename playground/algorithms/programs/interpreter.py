"""Interprets programs like those of the small world, step by step, without running them as Python.

Only what `evaluate` names exists: numbers, words, lists of them, and a few functions and methods that return such
values. So a program written by a model can reach nothing else, and work, sizes and depth are bounded.
"""
from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

WORK = 200_000  # nodes that one program may evaluate, and items of their values
SIZE = 10_000  # items of a list or letters of a word
LARGEST = 10 ** 30  # absolute value of a number
DEPTH = 100  # of nested nodes and calls

FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Lt: operator.lt, ast.Gt: operator.gt, ast.LtE: operator.le, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}
UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len, "min": min, "max": max, "abs": abs, "sum": sum, "sorted": sorted, "list": list, "str": str, "int": int,
    "enumerate": lambda items, start=0: list(enumerate(items, start)), "zip": lambda *items: list(zip(*items)),
    "range": lambda *bounds: _bounded(range(*bounds)),
}
METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    str: {"upper": str.upper, "lower": str.lower, "split": str.split, "count": str.count, "replace": str.replace,
          "join": str.join},
    list: {"append": list.append, "count": list.count},
}


class NotInterpreted(ValueError):
    """The program has something that is not interpreted, fails, or exceeds a bound."""


class Returned(Exception):
    """A return statement; args[0] is the value."""


class Interpreter:
    """Runs the statements of one program one after the other, on variables of its own."""

    def __init__(self, helpers: list[ast.FunctionDef]):
        self._helpers = {helper.name: helper for helper in helpers}
        self._work = self._depth = 0

    def run(self, statement: ast.stmt, variables: dict[str, Any]) -> None:
        """Run a statement, which changes the variables. Raises NotInterpreted."""
        try:
            self._run(statement, variables)
        except FAILURES as error:
            raise NotInterpreted(str(error)) from None

    def _run(self, node: ast.stmt, variables: dict[str, Any]) -> None:
        self._count()
        if isinstance(node, ast.Assign):
            value = self._value(node.value, variables)
            for target in node.targets:
                self._store(target, value, variables)
        elif isinstance(node, ast.AugAssign):
            change = ast.BinOp(_loaded(node.target), node.op, node.value)
            self._store(node.target, self._value(change, variables), variables)
        elif isinstance(node, ast.For):
            for item in self._value(node.iter, variables):
                self._store(node.target, item, variables)
                self._body(node.body, variables)
        elif isinstance(node, ast.While):
            while self._value(node.test, variables):
                self._body(node.body, variables)
        elif isinstance(node, ast.If):
            self._body(node.body if self._value(node.test, variables) else node.orelse, variables)
        elif isinstance(node, ast.Return) and node.value:
            raise Returned(self._value(node.value, variables))
        elif isinstance(node, ast.Expr):
            self._value(node.value, variables)
        else:
            raise NotInterpreted(type(node).__name__)

    def _body(self, body: list[ast.stmt], variables: dict[str, Any]) -> None:
        for statement in body:
            self._run(statement, variables)

    def _store(self, target: ast.expr, value: Any, variables: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            variables[target.id] = value
        elif isinstance(target, ast.Tuple):
            for part, each in zip(target.elts, value, strict=True):
                self._store(part, each, variables)
        elif isinstance(target, ast.Subscript):
            self._value(target.value, variables)[self._value(target.slice, variables)] = _item(value)
        else:
            raise NotInterpreted(type(target).__name__)

    def _value(self, node: ast.expr, variables: dict[str, Any]) -> Any:
        """The value of an expression, within the bounds."""
        self._count()
        self._depth += 1
        if self._depth > DEPTH:
            raise NotInterpreted("nested too deep")
        try:
            value = self._evaluated(node, variables)
            self._count(len(value) if isinstance(value, (list, str, tuple, dict)) else 0)
            return _bounded(value)
        finally:
            self._depth -= 1

    def _evaluated(self, node: ast.expr, variables: dict[str, Any]) -> Any:
        evaluate = getattr(self, f"_of_{type(node).__name__}", None)
        if evaluate is None:
            raise NotInterpreted(type(node).__name__)
        return evaluate(node, variables)

    def _of_Constant(self, node: ast.Constant, variables: dict[str, Any]) -> Any:
        if not isinstance(node.value, (int, str, type(None))):
            raise NotInterpreted("a constant")
        return node.value

    def _of_Name(self, node: ast.Name, variables: dict[str, Any]) -> Any:
        return variables[node.id]

    def _of_List(self, node: ast.List, variables: dict[str, Any]) -> Any:
        return [self._value(each, variables) for each in node.elts]

    def _of_Tuple(self, node: ast.Tuple, variables: dict[str, Any]) -> Any:
        return tuple(self._value(each, variables) for each in node.elts)

    def _of_BinOp(self, node: ast.BinOp, variables: dict[str, Any]) -> Any:
        left, right = self._value(node.left, variables), self._value(node.right, variables)
        if isinstance(node.op, (ast.Mult, ast.Mod)) and not (isinstance(left, int) and isinstance(right, int)):
            raise NotInterpreted("a repeated or formatted word")
        return OPERATORS[type(node.op)](left, right)

    def _of_UnaryOp(self, node: ast.UnaryOp, variables: dict[str, Any]) -> Any:
        return UNARY[type(node.op)](self._value(node.operand, variables))

    def _of_BoolOp(self, node: ast.BoolOp, variables: dict[str, Any]) -> Any:
        wanted = isinstance(node.op, ast.Or)
        for operand in node.values:
            value = self._value(operand, variables)
            if bool(value) == wanted:
                break
        return value

    def _of_Compare(self, node: ast.Compare, variables: dict[str, Any]) -> bool:
        left = self._value(node.left, variables)
        for op, operand in zip(node.ops, node.comparators):
            right = self._value(operand, variables)
            if not OPERATORS[type(op)](left, right):
                return False
            left = right
        return True

    def _of_IfExp(self, node: ast.IfExp, variables: dict[str, Any]) -> Any:
        return self._value(node.body if self._value(node.test, variables) else node.orelse, variables)

    def _of_Subscript(self, node: ast.Subscript, variables: dict[str, Any]) -> Any:
        return self._value(node.value, variables)[self._value(node.slice, variables)]

    def _of_Slice(self, node: ast.Slice, variables: dict[str, Any]) -> slice:
        return slice(*(each and self._value(each, variables) for each in (node.lower, node.upper, node.step)))

    def _of_ListComp(self, node: ast.ListComp | ast.GeneratorExp, variables: dict[str, Any]) -> list[Any]:
        return [self._value(node.elt, inner) for inner in self._looped(node.generators, dict(variables))]

    _of_GeneratorExp = _of_ListComp

    def _looped(self, loops: list[ast.comprehension], variables: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The variables for each item of a comprehension."""
        if not loops:
            yield variables
            return
        for item in self._value(loops[0].iter, variables):
            self._store(loops[0].target, item, variables)
            if all(self._value(test, variables) for test in loops[0].ifs):
                yield from self._looped(loops[1:], variables)

    def _of_Call(self, node: ast.Call, variables: dict[str, Any]) -> Any:
        given = [self._value(each, variables) for each in node.args]
        if isinstance(node.func, ast.Attribute):
            return self._method(node.func, given, variables)
        if not isinstance(node.func, ast.Name):
            raise NotInterpreted("a call")
        if node.func.id in self._helpers:
            return self._helped(self._helpers[node.func.id], given)
        named = {str(each.arg): self._keyword(each, variables) for each in node.keywords}
        return FUNCTIONS[node.func.id](*given, **named)

    def _keyword(self, keyword: ast.keyword, variables: dict[str, Any]) -> Any:
        if isinstance(keyword.value, ast.Name) and keyword.value.id == "len":
            return len
        return self._value(keyword.value, variables)

    def _method(self, function: ast.Attribute, given: list[Any], variables: dict[str, Any]) -> Any:
        if isinstance(function.value, ast.Name) and (function.value.id, function.attr) == ("dict", "fromkeys"):
            return dict.fromkeys(*given)
        owner = self._value(function.value, variables)
        if function.attr == "append":
            _item(*given)
        if function.attr == "replace" and len(owner) * max(1, len(given[1])) > SIZE:
            raise NotInterpreted("a long word")
        return METHODS[type(owner)][function.attr](owner, *given)

    def _helped(self, helper: ast.FunctionDef, given: list[Any]) -> Any:
        names = [each.arg for each in helper.args.args]
        try:
            self._body(helper.body, dict(zip(names, given, strict=True)))
        except Returned as found:
            return found.args[0]
        return None

    def _count(self, items: int = 0) -> None:
        self._work += 1 + items
        if self._work > WORK:
            raise NotInterpreted("too much work")


def _loaded(target: ast.expr) -> ast.expr:
    """The expression that reads what an assignment stores."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _bounded(value: Any) -> Any:
    """The value. Raises NotInterpreted if it is too large, or a list in a list, which could grow without end."""
    if isinstance(value, (list, str, tuple, range, dict)) and len(value) > SIZE:
        raise NotInterpreted("too many items")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise NotInterpreted("a large number")
    if isinstance(value, list):
        for each in value:
            _item(each)
    return value


def _item(value: Any) -> Any:
    """A value that may be in a list: a number, a word, or a tuple of these."""
    parts = value if isinstance(value, tuple) else (value,)
    if any(isinstance(part, (list, tuple, dict, range)) for part in parts):
        raise NotInterpreted("a list in a list")
    return value
