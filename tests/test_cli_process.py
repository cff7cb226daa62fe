"""The command as a process of its own: interrupts, broken pipes, encodings, terminals, and how little it imports."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_engine.py")
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "TERM": "xterm"}


def command(scene, *args):
    return [sys.executable, str(FAKE), scene, *args]


TELLS_WHEN_MAIN_RUNS = f"""
import sys
sys.path.insert(0, {str(FAKE.parent)!r})
import fake_engine
from dflash_mlx.cli.main import main

class Arguments(list):
    def __getitem__(self, at):  # the first thing that main does
        print("main", file=sys.stderr, flush=True)
        return super().__getitem__(at)

scene = fake_engine.SCENES[sys.argv.pop(1)]()
sys.argv = Arguments(sys.argv)
sys.exit(main(engine=scene))
"""


def hear_interrupts() -> None:
    """A shell's background jobs ignore interrupts, and so would what they start: a test run may be such a job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def start(scene, *args, program=(sys.executable, str(FAKE)), **options):
    """Run the command on a scene of the fake engine; the process never outlives the test."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with subprocess.Popen([*program, scene, *args], env=ENVIRONMENT, preexec_fn=hear_interrupts, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out.decode(), err.decode()


class TestInterrupts:
    def test_amid_an_answer(self):
        with start("endless", "generate", "hi") as process:
            assert os.read(process.stdout.fileno(), 5) == b"word "
            process.send_signal(signal.SIGINT)
            code, out, err = finish(process)
        assert (code, err) == (130, "")
        assert set(out.split()) <= {"word"} and out.endswith("\n")

    def test_while_loading(self):
        with start("slow-load", "generate", "hi") as process:
            assert process.stderr.readline() == b"loading\n"
            process.send_signal(signal.SIGINT)
            assert finish(process) == (130, "", "")

    @pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3])
    def test_from_the_first_moment_on_there_is_no_traceback(self, delay):
        with start("endless", "generate", "hi", program=(sys.executable, "-c", TELLS_WHEN_MAIN_RUNS)) as process:
            assert process.stderr.readline() == b"main\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            code, _, err = finish(process)
        assert (code, err) == (130, "")

    def test_a_chat_goes_on_after_it(self):
        with start("endless", "chat", stdin=subprocess.PIPE) as process:
            process.stdin.write(b"one\n")
            process.stdin.flush()
            assert os.read(process.stdout.fileno(), 5) == b"word "
            process.send_signal(signal.SIGINT)
            assert b"stays in the conversation" in process.stderr.readline()
            out, err = process.communicate(b"two\n", timeout=30)
        assert (process.returncode, err) == (0, b"")
        assert out.endswith(b"second answer\n")


class TestPipes:
    def test_a_reader_that_leaves_is_no_failure(self):
        with start("flood", "generate", "hi") as process:
            process.stdout.read(100)
            process.stdout.close()
            assert (process.wait(timeout=30), process.stderr.read()) == (0, b"")

    def test_a_reader_that_is_gone_before_the_first_word(self):
        read, write = os.pipe()
        os.close(read)
        with start("short", "generate", "hi", stdout=write) as process:
            os.close(write)
            assert (process.wait(timeout=30), process.stderr.read()) == (0, b"")

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    def test_a_full_disk_is_one_line(self):
        with open("/dev/full", "w") as full, start("short", "generate", "hi", stdout=full) as process:
            assert (process.wait(timeout=30), process.stderr.read()) == (
                1,
                b"dflash-mlx: [Errno 28] No space left on device\n",
            )

    def test_a_closed_stdout_is_survived(self):
        line = f"{sys.executable} {FAKE} short generate hi </dev/null >&-"
        done = subprocess.run(line, shell=True, env=ENVIRONMENT, timeout=30, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")

    def test_without_stderr_the_answer_stays_alone_on_stdout(self):
        line = f"{sys.executable} {FAKE} short generate hi --stats </dev/null 2>&-"
        done = subprocess.run(line, shell=True, env=ENVIRONMENT, timeout=30, stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout) == (0, b"Hello there.\n")

    def test_a_pipe_that_sends_nothing_is_explained(self):
        with start("short", "generate", "hi", stdin=subprocess.PIPE) as process:
            assert process.stderr.readline().startswith(b"note: waiting for the pipe")
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, b"Hello there.\n", b"")

    def test_a_terminal_without_unicode_gets_marks(self):
        done = subprocess.run(
            command("wave", "generate", "hi"), env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=30,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, b"wave ?\n")


def test_a_paste_of_several_lines_is_one_message(monkeypatch, tmp_path):
    readline = pytest.importorskip("readline")
    if "GNU" not in (readline.__doc__ or "") or readline._READLINE_VERSION < 0x801:
        pytest.skip("needs GNU readline 8.1 for bracketed paste")
    (tmp_path / "inputrc").write_text("set enable-bracketed-paste off\n")
    monkeypatch.setitem(ENVIRONMENT, "INPUTRC", str(tmp_path / "inputrc"))
    main, side = pty.openpty()
    with start("echo", "chat", stdin=side, stdout=side, stderr=side) as process:
        os.close(side)
        read_until(main, rb"\x1b\[\?2004h> $")  # the request for marks around a paste
        os.write(main, b"\x1b[200~def f():\n    return 1\x1b[201~\r")
        shown = read_until(main, rb"END\r\n.*> $")
        os.write(main, b"\x04")
        assert process.wait(timeout=30) == 0
    os.close(main)
    assert b"GOT 'def f():\\n    return 1' END" in shown


def read_until(terminal, mark):
    """Return what a terminal shows up to a pattern, which must come within half a minute."""
    shown = b""
    deadline = time.monotonic() + 30
    while not re.search(mark, shown, re.DOTALL) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096)
    assert re.search(mark, shown, re.DOTALL), shown
    return shown


class TestImports:
    @pytest.mark.parametrize(
        "args", [["--help"], ["generate", "--help"], ["--version"], ["generate", "hi", "--top-p", "9"]]
    )
    def test_nothing_heavy_is_imported_before_it_is_needed(self, args):
        code = (
            "import sys; from dflash_mlx.cli.main import main; main(sys.argv[1:]); "
            "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'rich', 'huggingface_hub'}; "
            "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *args], env=ENVIRONMENT, capture_output=True, text=True, timeout=30
        )
        assert done.stderr.splitlines()[-1] == "[]"

    def test_the_package_runs_as_a_module(self):
        done = subprocess.run(
            [sys.executable, "-m", "dflash_mlx", "--version"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0 and done.stdout.startswith("dflash-mlx ")
