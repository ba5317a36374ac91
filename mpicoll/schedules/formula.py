"""Closed forms: arithmetic expressions in a few named quantities, kept as text so that they can be printed.

An expression has Python's syntax and meaning: numbers, the names of the quantities, ``+ - * / // % **``, comparisons,
``a if condition else b``, ``min(...)``, ``max(...)``, and ``sum(expression for k in range(count))``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpicoll.errors import AlgorithmError

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def evaluate(text: str, quantities: Mapping[str, int | Fraction]) -> Fraction:
    """Return the exact value of an expression. Raises AlgorithmError if it has another form or an unknown name."""
    try:
        return Fraction(_value(_parse(text), quantities))
    except (SyntaxError, TypeError) as error:
        raise AlgorithmError(
            f"closed form {text!r}: {error}; it may contain numbers, {', '.join(quantities)}, arithmetic, comparisons,"
            " if-else, min, max and sum(... for k in range(...))"
        ) from error


def check_formula(text: str, names: Iterable[str]) -> None:
    """Raise AlgorithmError unless `text` is an expression in the quantities `names`."""
    for value in (1, 2):
        with suppress(ZeroDivisionError):
            evaluate(text, dict.fromkeys(names, Fraction(value)))


@lru_cache(maxsize=256)
def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, names: Mapping[str, int | Fraction]) -> Any:
    match node:
        case ast.Constant(value=int(number) | float(number)):
            return number
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.Compare(left=left, ops=ops, comparators=comparators) if {type(op) for op in ops} <= _OPERATORS.keys():
            values = [_value(one, names) for one in (left, *comparators)]
            return all(_OPERATORS[type(op)](*pair) for op, *pair in zip(ops, values, values[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, names) else orelse, names)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments, keywords=[]):
            return {"min": min, "max": max}[name](*(_value(one, names) for one in arguments))
        case ast.Call(
            func=ast.Name(id="sum"),
            args=[
                ast.GeneratorExp(
                    elt=term,
                    generators=[
                        ast.comprehension(
                            target=ast.Name(id=index), iter=ast.Call(func=ast.Name(id="range"), args=[count]), ifs=[]
                        )
                    ],
                )
            ],
        ):
            return sum(_value(term, {**names, index: k}) for k in range(int(_value(count, names))))
    raise TypeError(f"{ast.unparse(node)!r} is not allowed")
