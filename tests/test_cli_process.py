"""The command as a process of its own: interrupts, broken pipes, encodings, terminals, and how little it imports."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_engine.py")
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "TERM": "xterm"}


def command(scene, *args):
    return [sys.executable, str(FAKE), scene, *args]


def start(scene, *args, **options):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command(scene, *args), env=ENVIRONMENT, **pipes)


def finish(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out.decode(), err.decode()


class TestInterrupts:
    def test_amid_an_answer(self):
        process = start("endless", "generate", "hi")
        assert process.stdout.read(5) == b"word "
        process.send_signal(signal.SIGINT)
        code, out, err = finish(process)
        assert (code, err) == (130, "")
        assert set(out.split()) <= {"word"} and out.endswith("\n")

    def test_while_loading(self):
        process = start("slow-load", "generate", "hi")
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        assert finish(process) == (130, "", "")

    @pytest.mark.parametrize("delay", [0.15, 0.2, 0.25, 0.3, 0.4])
    def test_at_any_moment_there_is_no_traceback(self, delay):
        process = start("endless", "generate", "hi")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
        if code == -signal.SIGINT:  # Python itself was still starting, before any line of ours
            pytest.skip("the interrupt came before Python ran")
        assert (code, "Traceback" in err) == (130, False)

    def test_a_chat_goes_on_after_it(self):
        process = start("endless", "chat", stdin=subprocess.PIPE)
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"word "
        process.send_signal(signal.SIGINT)
        assert b"stays in the conversation" in process.stderr.readline()
        out, err = process.communicate(b"two\n", timeout=30)
        assert (process.returncode, err) == (0, b"")
        assert out.endswith(b"second answer\n")


class TestPipes:
    def test_a_reader_that_leaves_is_no_failure(self):
        process = start("flood", "generate", "hi")
        process.stdout.read(100)
        process.stdout.close()
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == b""

    def test_a_reader_that_is_gone_before_the_first_word(self):
        read, write = os.pipe()
        os.close(read)
        process = start("short", "generate", "hi", stdout=write)
        os.close(write)
        assert (process.wait(timeout=30), process.stderr.read()) == (0, b"")

    def test_a_full_disk_is_one_line(self):
        if not os.path.exists("/dev/full"):
            pytest.skip("needs /dev/full")
        with open("/dev/full", "w") as full:
            process = start("short", "generate", "hi", stdout=full)
            assert (process.wait(timeout=30), process.stderr.read()) == (1, b"dflash-mlx: [Errno 28] No space left on device\n")

    def test_a_closed_stdout_is_survived(self):
        done = subprocess.run(
            f"{sys.executable} {FAKE} short generate hi >&- 2>&1 </dev/null", shell=True, env=ENVIRONMENT, timeout=30
        )
        assert done.returncode in (0, 1)

    def test_a_terminal_without_unicode_gets_marks(self):
        done = subprocess.run(
            command("wave", "generate", "hi"), env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=30,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, b"wave ?\n")


def test_a_paste_of_several_lines_is_one_message():
    readline = pytest.importorskip("readline")
    if "GNU" not in (readline.__doc__ or "") or readline._READLINE_VERSION < 0x801:
        pytest.skip("needs GNU readline 8.1 for bracketed paste")
    main, side = pty.openpty()
    process = start("echo", "chat", stdin=side, stdout=side, stderr=side)
    os.close(side)
    shown = read_until(main, b"> ")
    os.write(main, b"\x1b[200~def f():\n    return 1\x1b[201~\r")
    shown = read_until(main, b"END")
    os.write(main, b"\x04")
    assert process.wait(timeout=30) == 0
    assert b"GOT 'def f():\\n    return 1' END" in shown


def read_until(terminal, mark):
    shown = b""
    deadline = time.monotonic() + 30
    while mark not in shown and time.monotonic() < deadline:
        shown += os.read(terminal, 4096)
    return shown


class TestImports:
    @pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["--version"], ["generate", "hi", "--top-p", "9"]])
    def test_nothing_heavy_is_imported_before_it_is_needed(self, args):
        code = (
            "import sys; from dflash_mlx.cli.main import main; main(sys.argv[1:]); "
            "print(sorted({'mlx', 'mlx_lm', 'transformers', 'numpy', 'rich', 'huggingface_hub'} & sys.modules.keys()), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code, *args], env=ENVIRONMENT, capture_output=True, text=True, timeout=30)
        assert done.stderr.splitlines()[-1] == "[]"

    def test_the_package_runs_as_a_module(self):
        done = subprocess.run(
            [sys.executable, "-m", "dflash_mlx", "--version"], env=ENVIRONMENT, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0 and done.stdout.startswith("dflash-mlx ")
