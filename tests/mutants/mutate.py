"""What can be broken in a line of Python: one small change of its text at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARE = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
SWAPPED_SAYS_NOTHING = frozenset({"isinstance", "getattr", "setattr", "hasattr", "cast", "max", "min"})
"""It is refused at once, or it is the same."""
_COLLECTIONS = frozenset({"list", "dict", "set", "tuple", "frozenset"})
_PLACES = (ast.Attribute, ast.Subscript)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """The bytes from ``begin`` to ``end`` of a source file replaced by ``new``."""

    kind: str
    line: int
    """Where it is, from 1."""
    begin: int
    end: int
    new: str
    ran: tuple[int, int]
    """The first and last line of the statement (of a compound one: of its head); a test that runs one runs this."""
    late: bool
    """Inside a function: what was imported already can be changed."""

    def applied(self, source: bytes) -> bytes:
        """The source with this change."""
        return source[: self.begin] + self.new.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """``before -> after`` of the lines that change, without what is the same around them."""
        first = source.rfind(b"\n", 0, self.begin) + 1
        last = source.find(b"\n", self.end)
        before = source[first:last].decode()
        after = source[first : self.begin].decode() + self.new + source[self.end : last].decode()
        return f"{' '.join(before.split())} -> {' '.join(after.split())}"


def mutations(source: bytes) -> list[Mutation]:
    """Every change that is known for a source file, in order."""
    return sorted(_File(source).found(), key=lambda one: (one.line, one.begin, one.kind, one.new))


class _File:
    def __init__(self, source: bytes) -> None:
        self._tree = ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def found(self) -> Iterator[Mutation]:
        yield from self._body(self._tree.body, late=False)

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _change(self, kind: str, node: ast.expr | ast.stmt, new: str, ran: tuple[int, int], late: bool) -> Mutation:
        end = self._at(node.end_lineno or node.lineno, node.end_col_offset or 0)
        begin = self._at(node.lineno, node.col_offset)
        return Mutation(kind=kind, line=node.lineno, begin=begin, end=end, new=new, ran=ran, late=late)

    def _body(self, body: list[ast.stmt], *, late: bool) -> Iterator[Mutation]:
        for i, statement in enumerate(body):
            if _is_text(statement) or isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            if isinstance(statement, ast.ClassDef):
                yield from self._body(statement.body, late=False)
            elif isinstance(statement, FUNCTIONS):
                yield from self._body(statement.body, late=True)
            else:
                yield from self._statement(statement, first=i == 0, late=late)

    def _statement(self, statement: ast.stmt, *, first: bool, late: bool) -> Iterator[Mutation]:
        inner = list(_bodies(statement))
        last = min((body[0].lineno for body in inner), default=(statement.end_lineno or statement.lineno) + 1) - 1
        ran = (statement.lineno, max(last, statement.lineno))
        for kind, new in _statement_changes(statement, first=first, late=late):
            yield self._change(kind, statement, new, ran, late)
        if not isinstance(statement, ast.Raise):  # what an error says is text
            for node in _expressions(statement):
                for kind, new in _expression_changes(node):
                    yield self._change(kind, node, new, ran, late)
        if isinstance(statement, ast.If | ast.While):
            yield self._change("condition", statement.test, _not(statement.test), ran, late)
        for body in inner:
            yield from self._body(body, late=late)


def _statement_changes(statement: ast.stmt, *, first: bool, late: bool) -> Iterator[tuple[str, str]]:
    """Deleted, or ended early with ``return``; a first binding of a name is kept, to delete it finds itself."""
    targets = statement.targets if isinstance(statement, ast.Assign | ast.Delete) else []
    binds = isinstance(statement, ast.AnnAssign) or not all(isinstance(to, _PLACES) for to in targets)
    if isinstance(statement, ast.Return):
        if statement.value is not None and not _is_constant(statement.value):
            yield "return", "return None"
    elif isinstance(statement, ast.Raise | ast.Continue | ast.Break) or (
        isinstance(statement, ast.Expr | ast.AugAssign | ast.Assign | ast.Delete) and not binds
    ):
        yield "deleted", "pass"
        if late and not first and isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign):
            yield "return", "return"


def _expression_changes(node: ast.expr) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(ops=[op]):
            for new in COMPARE[type(op)]:
                yield "comparison", f"({ast.unparse(node.left)} {new} {ast.unparse(node.comparators[0])})"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield "and/or", f"({word.join(f'({ast.unparse(one)})' for one in values)})"
            for one in values:  # one of them left out
                left = [other for other in values if other is not one]
                yield "and/or", f"({ast.unparse(left[0] if len(left) == 1 else ast.BoolOp(op=op, values=left))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", f"({ast.unparse(operand)})"
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", f"({ast.unparse(node.left)} {ARITHMETIC[type(op)]} ({ast.unparse(node.right)}))"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "condition", f"({ast.unparse(body)} if {_not(test)} else {ast.unparse(orelse)})"
        case ast.Constant(value=bool() as value):
            yield "constant", str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", str(value + 1)
            yield "constant", f"({value - 1})"
        case ast.Constant(value=float() as value):
            yield "constant", str(value + 1.0)
        case ast.Constant(value=str() as value) if not any(one.isspace() for one in value):
            yield "constant", repr(f"{value}XX")
        case ast.Call(func=func, args=[one, other, *rest], keywords=keywords):
            if not _swaps_nothing(func, [one, other]) and ast.dump(one) != ast.dump(other):
                swapped = ast.Call(func=func, args=[other, one, *rest], keywords=keywords)
                yield "arguments", ast.unparse(swapped)
        case _:
            pass


def _swaps_nothing(func: ast.expr, args: list[ast.expr]) -> bool:
    name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
    return name in SWAPPED_SAYS_NOTHING or any(isinstance(one, ast.Starred) for one in args)


def _not(test: ast.expr) -> str:
    return f"(not ({ast.unparse(test)}))"


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if body := getattr(statement, name, None):
            yield body
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement, without those of statements inside it, types and formatted text."""
    left: list[ast.AST] = []
    for name, value in ast.iter_fields(statement):
        if name not in ("body", "orelse", "finalbody", "handlers", "annotation", "type_comment"):
            left.extend(value if isinstance(value, list) else [value])
    while left:
        node = left.pop()
        if isinstance(node, ast.JoinedStr) or not isinstance(node, ast.AST):
            continue
        if isinstance(node, ast.match_case):
            left.extend([node.pattern, *([node.guard] if node.guard else [])])
            continue
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice) and _is_type(node.value):
            continue  # list[int]() and its like
        if isinstance(node, ast.expr):
            yield node
        left.extend(ast.iter_child_nodes(node))


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and (node.id in _COLLECTIONS or node.id[0].isupper())


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)
