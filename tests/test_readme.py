"""The README shows the command's real help."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"<!-- help: (?P<args>.*?) -->\n```text\n(?P<text>.*?)```", re.DOTALL)


def test_every_help_block_is_what_the_command_prints(transcript, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    blocks = list(BLOCK.finditer(README.read_text(encoding="utf-8")))
    assert blocks, "README.md needs a <!-- help: --help --> mark with a text block behind it"
    for block in blocks:
        assert block["text"] == transcript(block["args"].split())[1]
