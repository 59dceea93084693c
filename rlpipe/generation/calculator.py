"""A worked example of several turns with a tool: the policy may write `<<12 + 30>>`, and gets ` = 42` to go on with."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

from rlpipe.generation.conversation import Conversation
from rlpipe.generation.stop_strings import before_stop

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_EXPRESSION = 200


async def calculator(conversation: Conversation, max_calls: int = 8) -> None:
    """Lets the policy write, and answers up to `max_calls` expressions between `<<` and `>>`."""
    for _ in range(max_calls):
        text = await conversation.write(stop=(">>",))
        if conversation.finished:
            return
        asked = re.search(r"<<([^<>]*)$", before_stop(text, (">>",))[0])
        conversation.insert(f" = {evaluate(asked.group(1))} " if asked else " = ? ")
        if conversation.finished:
            return
    await conversation.write()


def evaluate(expression: str) -> str:
    """Value of a sum, difference, product or quotient of numbers; `?` for anything else."""
    if len(expression) > _LONGEST_EXPRESSION:
        return "?"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return "?"
    return str(int(value)) if value == int(value) else f"{value:g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")
