"""The script's entry: every ending becomes an exit code and at most one line on stderr."""

import io
import os
import sys
from collections.abc import Sequence

from dflash_mlx.cli.interrupts import INTERRUPTED, leave_at_once
from dflash_mlx.errors import DFlashError, OptionError

DONE, FAILED, USAGE = 0, 1, 2


def main(args: Sequence[str] | None = None, engine: object = None) -> int:
    """Run a command line (sys.argv without `args`) and return its exit code.

    `engine` is a function that returns the engine to use instead of dflash_mlx.api.
    """
    _occupy_standard_files()
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # a process may lack them
    try:
        code = _run(sys.argv[1:] if args is None else args, engine)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = DONE  # the reader has seen enough; nothing failed
    except OptionError as error:
        code = _refuse(error, USAGE)
    except UnicodeDecodeError:
        code = _refuse("what came through the pipe is not UTF-8 text", FAILED)
    except (DFlashError, OSError) as error:
        code = _refuse(error, FAILED)
    except (MemoryError, RuntimeError) as error:  # what MLX raises when the machine gives out
        code = _refuse(f"the engine failed: {str(error) or 'out of memory'}; see dflash-mlx doctor", FAILED)
    _let_go_of_stdout()
    return code


def _run(args: Sequence[str], engine: object) -> int:
    with leave_at_once():
        from typer import Exit
        from typer.main import get_command

        from dflash_mlx.cli.app import UsageError, app
        from dflash_mlx.cli.engine import load_engine

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets a mark, not an error
            stream.reconfigure(errors="replace")
    try:
        with get_command(app).make_context(
            "dflash-mlx", list(args) or ["--help"], obj=engine or load_engine
        ) as context:
            context.command.invoke(context)
        return DONE
    except Exit as ending:
        return ending.exit_code
    except UsageError as error:
        asked = error.ctx.command_path if error.ctx else "dflash-mlx"
        return _refuse(f"{error.format_message()} (see {asked} --help)", USAGE)


def _occupy_standard_files() -> None:
    """Open nothing in the place of a closed standard file: MLX cannot read weights through descriptor 0."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)


def _refuse(reason: object, code: int) -> int:
    line = " ".join(str(reason).split())
    print(f"dflash-mlx: {line}", file=sys.stderr, flush=True)
    return code


def _let_go_of_stdout() -> None:
    """Point a stdout that cannot be written at nothing, since Python flushes it once more on its way out."""
    try:
        sys.stdout.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
