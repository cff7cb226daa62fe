"""Ctrl-C while modules are read: an exception would be lost where it falls into a callback of the import system."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def leave_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without unwinding; for imports only, when nothing is open and nothing is drawn."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
