"""What every Sextet command line shares: parsing, tables, progress bars, JSON and exit codes.

A command is a function from parsed arguments to a JSON-able dict. It shows its result for people through :func:`table`
and :func:`progress`; when ``--json`` is given, the dict goes to the file named (or to standard output, and then nothing
else does). Exit codes: 0 success, 1 a check failed, 2 wrong input, 130 interrupted.

Callers may not assume that standard output is a terminal: without one, progress bars print nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core_kernels.errors import CoreKernelsError

__all__ = ["CheckFailedError", "CommandLine", "emit", "format_bytes", "format_seconds", "progress", "say", "table"]

_quiet = False


class CheckFailedError(Exception):
    """A verification found a difference; the command ends with exit code 1 after showing its result.

    Args:
        message: What differed and by how much.
        result: The command's JSON-able result, shown all the same.
    """

    def __init__(self, message: str, result: dict[str, Any] | None = None):
        super().__init__(message)
        self.result = result


class CommandLine:
    """A program with sub-commands that all behave alike.

    Args:
        prog: Name of the program as the user types it.
        description: One sentence shown by ``--help``.
        version: Version shown by ``--version``.
        errors: Exception classes of the package whose message is meant for users: shown as one line, exit code 2, as
            are files that cannot be read or written.

    >>> cli = CommandLine("demo", "Adds numbers.", "1.0")
    >>> add = cli.command("add", lambda args: {"sum": args.a + args.b}, "add two integers", "demo add 1 2")
    >>> _ = add.add_argument("a", type=int)
    >>> _ = add.add_argument("b", type=int)
    >>> cli.run(["add", "1", "2", "--json"])
    {"sum": 3}
    0
    """

    def __init__(self, prog: str, description: str, version: str, errors: Sequence[type[BaseException]] = ()):
        self.parser = argparse.ArgumentParser(prog=prog, description=description)
        self.parser.add_argument("--version", action="version", version=f"{prog} {version}")
        self._commands = self.parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        self._errors = (CoreKernelsError, OSError, *errors)

    def command(
        self, name: str, function: Callable[[argparse.Namespace], dict[str, Any] | None], summary: str, example: str
    ) -> argparse.ArgumentParser:
        """Add a sub-command and return its parser, to which the caller adds arguments.

        Args:
            name: The sub-command.
            function: Takes the parsed arguments, shows its result, returns it as a JSON-able dict.
            summary: One line for ``--help``.
            example: One or more command lines shown under "examples".

        Returns:
            The parser of the sub-command, with ``--json`` already present.
        """
        examples = "\n".join("  " + line.strip() for line in example.strip().splitlines())
        parser = self._commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--json",
            nargs="?",
            const="-",
            metavar="FILE",
            help="write the result as JSON to FILE, or to standard output and nothing else when FILE is left out",
        )
        parser.set_defaults(function=function)
        return parser

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Parse ``argv``, run the sub-command and return the exit code."""
        global _quiet
        args = self.parser.parse_args(argv)
        _quiet = args.json == "-"
        try:
            emit(args.function(args), args.json)
        except CheckFailedError as failure:
            emit(failure.result, args.json)
            print(f"failed: {failure}", file=sys.stderr)
            return 1
        except self._errors as error:
            print(f"error: {_one_line(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130  # as shells report a program that an interrupt ended
        finally:
            _quiet = False
        return 0


def _one_line(error: BaseException) -> str:
    """Say what an error says; one of the operating system with the file first and the remedy last.

    >>> _one_line(FileNotFoundError(2, "No such file or directory", "graph.npz"))
    "'graph.npz' cannot be opened: No such file or directory; check the path, from the folder the program runs in"
    """
    if isinstance(error, OSError) and error.filename and error.strerror:
        return (
            f"{str(error.filename)!r} cannot be opened: {error.strerror}; "
            "check the path, from the folder the program runs in"
        )
    return str(error)


def emit(result: dict[str, Any] | list[Any] | None, target: str | None) -> None:
    """Write ``result`` as JSON to a file, to standard output (``"-"``), or nowhere (``None``)."""
    if result is None or target is None:
        return
    if target == "-":
        print(json.dumps(result))
    else:
        Path(target).write_text(json.dumps(result, indent=1) + "\n")


def say(text: str) -> None:
    """Print a line for people; silent while JSON goes to standard output."""
    if not _quiet:
        print(text, flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table for people: the first column left-aligned, the others right-aligned."""
    if _quiet:
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        shown.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(str(cell)) for cell in row))
    Console().print(shown)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar with the time left; yields ``advance(steps=1, note="")``.

    Args:
        label: What is being done.
        total: Number of steps, or ``None`` when unknown.

    >>> with progress("counting", 3) as advance:
    ...     for _ in range(3):
    ...         advance()
    """
    if _quiet or not sys.stdout.isatty():
        yield lambda steps=1, note="": None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with a binary unit.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the loop returns at TiB")


def format_seconds(seconds: float) -> str:
    """Write a duration with a fitting unit.

    >>> format_seconds(0), format_seconds(0.00042), format_seconds(0.25), format_seconds(75)
    ('0 s', '420 us', '250 ms', '75.0 s')
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s"
