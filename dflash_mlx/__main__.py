"""Lets `python -m dflash_mlx` do what the dflash-mlx script does."""

import sys

if __name__ == "__main__":
    from dflash_mlx.cli.main import main

    sys.exit(main())
