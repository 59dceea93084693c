"""A group of commands one of which needs no name."""

import typer
from typer.core import TyperGroup


class WithDefaultCommand(TyperGroup):
    """`GROUP ARGUMENTS` means `GROUP run ARGUMENTS` where the first argument names no command."""

    def parse_args(self, ctx: "typer.Context", args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)
