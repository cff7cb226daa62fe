#!/bin/sh
# Builds the wheel, installs it into a fresh environment outside the checkout, and runs the embedded pair there.
#   sh tests/wheel.sh PYTHON
set -eu
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build -q --wheel --outdir "$work" . >/dev/null
"$python" -m venv "$work/env"
"$work/env/bin/pip" install -q "$work"/*.whl
cd "$work"
"$work/env/bin/dflash-mlx" --version
answer=$("$work/env/bin/dflash-mlx" generate --pair tiny --max-tokens 24 --seed 1 "What is the sun?")
test -n "$answer"
echo "wheel: installed and answered outside the checkout"
