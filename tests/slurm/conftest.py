"""The one-node cluster, started once for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, InstantStudies, running, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster, to which the commands of Slurm are pointed meanwhile; skips where there
    cannot be one."""
    if reason := why_not():
        pytest.skip(f"no Slurm cluster here: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        running(Path(folder) / "cluster") as test_cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(test_cluster.configuration))
        patch.setenv("XDG_CACHE_HOME", f"{folder}/cache")
        yield test_cluster


@pytest.fixture
def instant(cluster: Cluster, tmp_path: Path) -> Iterator[InstantStudies]:
    """An empty store; afterwards nothing of it is in the queue and the node is idle, whatever
    became of the test."""
    yield (studies := InstantStudies(cluster, tmp_path))
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    studies.end()
