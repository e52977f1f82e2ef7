"""Settings of all tests: one thread, no network, no hub.

pyproject.toml makes this folder importable: `import tiny` gives the tiny models.
"""

import gc
import importlib
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
from hypothesis import HealthCheck, settings

# Examples are not timed, as a loaded machine is slow for seconds at a time, and are the same in
# every run; --hypothesis-profile=other draws others.
settings.register_profile("other", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("other"), derandomize=True)
settings.load_profile("same")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run as Python, on the CPU
# transformers copies the code of a checkpoint there before it runs it
if "HF_MODULES_CACHE" not in os.environ:
    modules = tempfile.TemporaryDirectory(prefix="modules-")
    os.environ["HF_MODULES_CACHE"] = modules.name
# as a shell starts what it runs in the background
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # processes that tests interrupt inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Or else hundreds of short processes compile the package, and pytest rewrites tests at each start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


GROUP_OF_FILE = {
    **dict.fromkeys(("test_slurm_cluster.py", "test_slurm_life.py"), "cluster"),
    **dict.fromkeys(("test_engine.py", "test_vllm.py"), "vllm"),
}
"""Test file -> its group. The files of a group share a server or an engine that starts slowly."""
EARLY_GROUPS = (
    "cluster",
    "vllm",
    "test_experiments.py",
    "test_report.py",
    "test_end_to_end.py",
    "test_methods.py",
)
"""Groups that begin first: the slowest ones, and those that wait for Slurm's jobs while other tests
run."""
SLOW_MARKS = ("slow", "root", "cuda")
"""Marks of tests that are not run with `-m quick`. Quick tests are run before each commit: they
take three minutes and use no network."""


def group(test: str) -> str:
    """The group of a test, by its id: all tests of a group run in one worker. A group is a file,
    whose tests share costly fixtures, or the group in GROUP_OF_FILE."""
    file = test.partition("::")[0].rpartition("/")[2]
    return GROUP_OF_FILE.get(file, file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects stay in memory, so the collector need not examine them


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: position for position, name in enumerate(EARLY_GROUPS)}
    items.sort(key=lambda item: order.get(group(item.nodeid), len(EARLY_GROUPS)))
    if (seed := config.getoption("shuffle")) is not None:
        generator = random.Random(seed)  # every worker has to find the same order
        keys = {name: generator.random() for name in sorted({group(item.nodeid) for item in items})}
        generator.shuffle(items)
        items.sort(key=lambda item: keys[group(item.nodeid)])
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.root)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if not any(map(item.get_closest_marker, SLOW_MARKS)):
            item.add_marker(pytest.mark.quick)
    cuda_items = [item for item in items if item.get_closest_marker("cuda")]
    if cuda_items and not importlib.import_module("torch").cuda.is_available():
        for item in cuda_items:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_configure(config: pytest.Config) -> None:
    """In quick runs, a connection to a network address is an error. Otherwise the workers of xdist
    share a preloaded Python."""
    if config.option.markexpr == "quick":
        sys.addaudithook(_refuse_network)
    elif config.getoption("numprocesses", None):  # None in a worker
        os.environ[preloaded.SHARED] = str(preloaded.python())


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and arguments[0].family != socket.AF_UNIX:
        raise OSError(f"a quick test connects to {arguments[1]}: mark it as slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole groups, in the order above.

    Marks of the kind xdist_group do nothing: xdist 3.8 writes groups into `_nodeid`, which pytest
    9.2 does not read.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


PUBLISHED_DATA = "MOE_LAB_TEST_DATA"
"""Environment variable with a folder of published data sets, by default ../shared/data beside the
repository; docs/robustness.md lists its files."""


@pytest.fixture(scope="session")
def published_data() -> Callable[[str, str], Path]:
    """The path of a file of published data. Skips the test where it is missing."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get(PUBLISHED_DATA, default))

    def path(name: str, source: str) -> Path:
        if not (folder / name).is_file():
            pytest.skip(f"needs {name} ({source}) in the folder that {PUBLISHED_DATA} names")
        return folder / name

    return path
