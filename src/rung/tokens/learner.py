"""A process of its own that learns merges: the library hears no signal while it learns, and a process can be ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from rung.errors import RungError
from rung.tokens import engines

if TYPE_CHECKING:
    import tokenizers

# Each merge rewrites whole words, so that the time for runs without a space grows with their length: they are cut for
# learning. Text is encoded uncut.
_RUN_CHARS = 16
_LENGTH_BYTES = 8
_MODULE = "rung.tokens.learner"


def learn(pieces: Iterable[str], end: str, vocab_size: int, min_frequency: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer with ``end`` as id 0 and all 256 bytes; no signal is heard meanwhile."""
    import tokenizers
    from tokenizers import pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        show_progress=False,
        special_tokens=[tokenizers.AddedToken(end, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learner = engines.byte_level_bpe({}, [], None)
    runs = pre_tokenizers.Split(tokenizers.Regex(rf"\S{{{_RUN_CHARS}}}"), "isolated")
    learner.pre_tokenizer = pre_tokenizers.Sequence([runs, engines.byte_level()])
    learner.train_from_iterator(pieces, trainer)
    learner.pre_tokenizer = engines.byte_level()
    return learner


def learn_apart(pieces: Iterable[str], end: str, vocab_size: int, min_frequency: int) -> tokenizers.Tokenizer:
    """Return what ``learn`` does, of a process that ends with this call, however that ends: by Ctrl-C at once.

    Raises:
        RungError: the process was killed by the system.
    """
    import tokenizers

    # Its modules are found where ours are, and not in the folder that the user is in. Ctrl-C is left to this process.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, json.dumps([end, vocab_size, min_frequency]))
        for piece in pieces:
            _send(process.stdin, piece)
        _send(process.stdin, None)
        learned = process.stdout.read()
        status = process.wait()
    except BrokenPipeError:
        status = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what it did not take
            process.stdin.close()
    if status < 0:
        raise RungError(
            "the process that learned the tokenizer was killed, as the system does when memory runs out",
            "take less tokenizer.training_memory",
        )
    if status:
        raise RuntimeError(f"the process that learned the tokenizer ended with status {status}")
    return tokenizers.Tokenizer.from_str(learned.decode())


def _send(pipe: IO[bytes], text: str | None) -> None:
    """Write a text and its length before it; ``None``: the last has been written."""
    data = None if text is None else text.encode("utf-8", "surrogatepass")
    pipe.write((-1 if data is None else len(data)).to_bytes(_LENGTH_BYTES, "little", signed=True))
    if data is None:
        pipe.flush()
    else:
        pipe.write(data)


def _received(pipe: IO[bytes]) -> Iterator[str]:
    while (length := int.from_bytes(_exactly(pipe, _LENGTH_BYTES), "little", signed=True)) >= 0:
        yield _exactly(pipe, length).decode("utf-8", "surrogatepass")


def _exactly(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:  # who asked has gone
        os._exit(1)
    return data


def _serve() -> None:
    """Learn from standard input; end at once when it ends, for then nobody waits any more."""
    pipe = sys.stdin.buffer
    received = _received(pipe)
    asked: list[Any] = json.loads(next(received))

    def pieces() -> Iterator[str]:
        yield from received
        threading.Thread(target=_exactly, args=(pipe, 1), daemon=True).start()

    learned = learn(pieces(), *asked).to_str()
    sys.stdout.buffer.write(learned.encode())
    sys.stdout.buffer.flush()
    os._exit(0)  # a thread waits for standard input, which stays open


if __name__ == "__main__":
    _serve()
