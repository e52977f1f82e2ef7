"""The one-node cluster, started once for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, why_not
from instant_studies import InstantStudies


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster, to which the commands of Slurm are pointed meanwhile; skips where there cannot be one."""
    if reason := why_not():
        pytest.skip(f"no Slurm cluster here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munge refuses a socket in a folder that others cannot enter
    own = Cluster(folder / "cluster")
    before = os.environ.get("SLURM_CONF")
    try:
        own.start()
        os.environ["SLURM_CONF"] = str(own.configuration)
        yield own
    finally:
        own.stop()
        if before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def instant(cluster: Cluster, tmp_path: Path) -> Iterator[InstantStudies]:
    """An empty store; afterwards nothing of it is in the queue and the node is idle, whatever became of the test."""
    yield (own := InstantStudies(cluster, tmp_path))
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    own.end()
