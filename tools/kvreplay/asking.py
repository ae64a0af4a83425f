"""What all commands share: their arguments, and how wrong questions are answered."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from kvcommon.errors import LogFormatError
from kvreplay.loading import LogSet, open_logs
from kvreplay.plot import PlotError
from kvreplay.printing import clean
from kvreplay.run import RunError
from kvreplay.story import NoSuchRequestError

#: Exit status where a question cannot be answered.
WRONG: Final = 2

Logs = Annotated[
    list[Path], typer.Argument(help="Log files, or directories of them.", show_default=False)
]
LogDir = Annotated[
    list[Path], typer.Argument(help="Directories of logs, or log files.", show_default=False)
]
OneLogDir = Annotated[
    Path, typer.Argument(help="A directory of logs, or a log file.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def open_or_exit(paths: list[Path]) -> LogSet:
    """Open logs; without any, say why and exit."""
    logs = open_logs(paths)
    if not logs.logs:
        for text in logs.unreadable or ["no logs given"]:
            complain(text)
        raise typer.Exit(WRONG)
    return logs


@contextmanager
def wrong_questions() -> Iterator[None]:
    """Say in one line what cannot be answered, and exit."""
    try:
        yield
    except (LogFormatError, NoSuchRequestError, PlotError, RunError) as error:
        complain(str(error))
        raise typer.Exit(WRONG) from None
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}")
        raise typer.Exit(WRONG) from None


def complain(text: str) -> None:
    """Say what is wrong, on stderr."""
    typer.echo(f"kvreplay: {clean(text)}", err=True)
