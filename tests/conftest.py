"""What all tests share: devices, the compilation cache, the profile of hypothesis, the data beside the project."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]

# Read by jax when it is first imported, and by the programs that tests start: four devices wherever the tests run, and
# compilations kept from one run of the tests to the next.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ["MPLBACKEND"] = "agg"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may touch the network

# A shell gives what it runs in the background a Ctrl-C that is ignored, and so do the programs that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("rung", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("rung")


# What trains whole runs, starts processes or compiles many programs; `make quick` leaves it to `make test`.
MEDIUM = (
    "run/",
    "cli/",
    "exchange/",
    "diagnose/",
    "corpus/test_aozora_works.py",
    "corpus/test_cleaning.py",
    "corpus/test_workers.py",
    "decode/test_generate.py",
    "decode/test_sampling.py",
    "report/test_trackers.py",
    "tokens/test_importing.py",
    "train/test_step.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of whole runs as medium."""
    for item in items:
        if item.path.relative_to(ROOT / "tests").as_posix().startswith(MEDIUM):
            item.add_marker(pytest.mark.medium)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a parity test where PyTorch is missing; fail it where ``PARITY=1`` promised that it is there."""
    if item.get_closest_marker("parity"):
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if missing and os.environ.get("PARITY"):
            pytest.fail(f"PARITY is set, but {' and '.join(missing)} cannot be imported", pytrace=False)
        if missing:
            pytest.skip(f"{' and '.join(missing)} not installed; `make test PARITY=1` installs them")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of texts beside the project, which are not part of it."""
    folder = ROOT / "../shared/data"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: texts that are not part of the project")
    return folder.resolve()
