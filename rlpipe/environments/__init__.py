"""Environments: what a policy acts in over many turns, their tools, and how episodes become samples."""

from rlpipe.environments.protocol import (
    Action,
    Environment,
    Message,
    Observation,
    Result,
    Step,
    Task,
    Unattended,
    shown,
)
from rlpipe.environments.tools import Tool, ToolBox, tool_of
from rlpipe.generation.written_calls import ToolCall

__all__ = [
    "Action",
    "Environment",
    "Message",
    "Observation",
    "Result",
    "Step",
    "Task",
    "Tool",
    "ToolBox",
    "ToolCall",
    "Unattended",
    "shown",
    "tool_of",
]
