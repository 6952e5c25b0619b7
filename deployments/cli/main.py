"""The `arbiter` command: see what holds memory, steer it, check a configuration, replace or end the
arbiter.

Commands that look and steer ask the front over HTTP, so they work from anywhere; `record`,
`upgrade` and `down` join the Ray cluster. What takes long to import (Ray, HTTP, the core) is
imported by the command that needs it.
"""

import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from arbiter.errors import ArbiterError
from arbiter.leases import URL
from deployments.cli import keys, replay
from deployments.cli.cluster import check, init, lifecycle, serve
from deployments.cli.leases import free, lease
from deployments.cli.output import CommandError, discard_stdout, say
from deployments.cli.see import metrics, plan, show
from deployments.cli.see.top import command as top
from deployments.cli.steer import commands as steer
from deployments.cli.steer import jobs, tasks

PANELS = ("See", "Steer", "Leases", "Cluster", "Keys", "Record and replay")


class Commands(TyperGroup):
    """What a command fails with becomes a line on stderr and the exit status 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Sorts commands by panel; typer would list groups of commands last."""
        return sorted(self.commands, key=lambda name: PANELS.index(self._panel(name)))

    def _panel(self, name: str) -> str:
        return str(getattr(self.commands[name], "rich_help_panel", None))

    def invoke(self, ctx: Any) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done
        except (CommandError, ArbiterError) as error:
            say(f"arbiter {ctx.invoked_subcommand}: {error}", "red")
            raise typer.Exit(1) from error
        except BrokenPipeError:  # the reader has seen enough
            discard_stdout()
            return None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="See what holds device memory, and steer it.",
    epilog=f"The front is at $ARBITER_URL ({URL}); the key is $ARBITER_KEY, on this machine else"
    " the one in ~/.local/state/serve-arbiter/admin.key.",
)

COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "See": (
        show.status,
        top.top,
        show.events,
        show.explain,
        plan.plan,
        show.residency,
        show.copies,
        show.pool,
        show.adapters,
        show.clients,
    ),
    "Steer": (
        steer.load,
        steer.unload,
        steer.grow,
        steer.shrink,
        steer.compact,
        steer.drop_copy,
        steer.floor,
        steer.settings,
        steer.forget,
    ),
    "Leases": (lease.lease, free.free, show.leases, steer.drain, steer.cleanup),
    "Cluster": (init.init, check.check, serve.serve, lifecycle.upgrade, lifecycle.down),
    "Record and replay": (replay.record, replay.whatif),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        name = command.__name__.replace("_", "-")
        app.command(name, rich_help_panel=panel)(command)
app.add_typer(metrics.app, name="metrics", rich_help_panel="See")
app.add_typer(tasks.app, name="task", rich_help_panel="Steer")
app.add_typer(jobs.app, name="jobs", rich_help_panel="Steer")
app.add_typer(keys.app, name="key", rich_help_panel="Keys")


def main(argv: list[str] | None = None) -> int:
    """The exit status of the command in `argv`, else of this process."""
    try:
        app(args=argv, prog_name="arbiter")
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("typer ends by SystemExit")
