"""What all tests share."""

import io
import sys

import mlx.core as mx
import pytest

# Golden data and bit-for-bit comparisons are the CPU's; tests of an Apple GPU ask for it themselves.
mx.set_default_device(mx.cpu)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def transcript(monkeypatch):
    """Run a command line in this process and return (exit code, stdout, stderr); each stream may be a terminal."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")

    def run(args, engine=None, stdin="", out_tty=False, err_tty=False):
        from dflash_mlx.cli.main import main

        streams = {
            "stdin": stdin if isinstance(stdin, io.TextIOBase) else io.StringIO(stdin),
            "stdout": Terminal() if out_tty else io.StringIO(),
            "stderr": Terminal() if err_tty else io.StringIO(),
        }
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = main(args, engine)
        return code, streams["stdout"].getvalue(), streams["stderr"].getvalue()

    return run
