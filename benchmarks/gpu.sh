#!/bin/sh
# The training step of the GPT-2 presets on one NVIDIA GPU, within five minutes; writes benchmarks/gpu.md.
#
#   benchmarks/gpu.sh          makes .venv-gpu with `pip install -e ".[cuda]"` where no Python at hand sees a GPU
#   benchmarks/gpu.sh --try    the same on a CPU with a tiny model, to see that it works; writes no page
#
# PYTHON names the Python to use. What does not fit in the time is left out, the most telling is measured first.
set -eu
begun=$(date +%s)
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3

case " $* " in
*" --try "*) ;;
*)
    if ! "$python" -c 'import rung, jax; assert jax.default_backend() == "gpu"' 2>/dev/null; then
        "$python" -m venv .venv-gpu
        .venv-gpu/bin/python -m pip install -qq --disable-pip-version-check -e ".[cuda]"
        python=.venv-gpu/bin/python
    fi
    ;;
esac
exec "$python" benchmarks/gpu.py --begun "$begun" "$@"
