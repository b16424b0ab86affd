"""One side of ``tokenizing.py``: encodes a file once, and says in JSON how long it took and how much memory.

python tokenize_once.py ours|plain CORES TEXT TOKENIZER STORE
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

BATCH_LINES = 4096  # of the plain loop; from 64 to 16,384 its speed differs by 6%


def main() -> None:
    """Encode."""
    side, cores, text, tokenizer, store = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    work = _ours if side == "ours" else _plain
    seconds, processor, tokens = work(Path(text), Path(tokenizer), Path(store))
    print(json.dumps({"seconds": seconds, "processor_seconds": processor, "tokens": tokens, "peak_bytes": _peak()}))


def _ours(text: Path, tokenizer: Path, store: Path) -> tuple[float, float, int]:
    from rung.config import DataConfig
    from rung.run.store import build

    begin, used = time.perf_counter(), time.process_time()
    built = build([str(text)], tokenizer, store, DataConfig(validation_fraction=0), overwrite=True, say=print)
    return time.perf_counter() - begin, time.process_time() - used, len(built.split("train"))


def _plain(text: Path, tokenizer: Path, store: Path) -> tuple[float, float, int]:
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    with text.open(encoding="utf-8", newline="\n") as file:
        lines = list(file)
    begin, used, tokens = time.perf_counter(), time.process_time(), 0
    for start in range(0, len(lines), BATCH_LINES):
        for encoding in encoder.encode_batch(lines[start : start + BATCH_LINES]):
            tokens += len(encoding.ids)
    return time.perf_counter() - begin, time.process_time() - used, tokens


def _peak() -> int:
    """Return the highest resident size of this program; getrusage would count what its parent had at the fork."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
