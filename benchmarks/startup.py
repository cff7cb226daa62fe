"""How long the command takes to its first line, and the package to import: medians in a process of their own each."""

import argparse
import json
import statistics
import subprocess
import sys
import time

CASES = {
    "python": ["-c", "pass"],
    "import dflash_mlx": ["-c", "import dflash_mlx"],
    "dflash-mlx --help": ["-c", "import sys; from dflash_mlx.cli.main import main; sys.exit(main(['--help']))"],
    "dflash-mlx generate --help": [
        "-c",
        "import sys; from dflash_mlx.cli.main import main; sys.exit(main(['generate', '--help']))",
    ],
}


def seconds(arguments: list[str]) -> float:
    """Run Python once and return the wall time in seconds."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    """Time every case in turn, so that a machine that slows down slows all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    runs = [{name: seconds(arguments) for name, arguments in CASES.items()} for _ in range(options.repeats + 1)][1:]
    medians = {name: statistics.median(run[name] for run in runs) for name in CASES}
    if options.json:
        print(json.dumps({"repeats": options.repeats, "median_s": medians}))
        return
    for name, median in medians.items():
        print(f"{median:6.3f} s  {name}")


if __name__ == "__main__":
    main()
