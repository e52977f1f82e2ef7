"""The one-node cluster, started once for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, InstantStudies, missing_requirement, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster, which the commands of Slurm use meanwhile. Skips the tests where no
    cluster can be started."""
    if reason := missing_requirement():
        pytest.skip(f"no Slurm cluster here: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        running_cluster(Path(folder) / "cluster") as test_cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(test_cluster.configuration))
        patch.setenv("XDG_CACHE_HOME", f"{folder}/cache")
        yield test_cluster


@pytest.fixture
def instant(cluster: Cluster, tmp_path: Path) -> Iterator[InstantStudies]:
    """Studies in an empty store. After the test their jobs are cancelled and the node is resumed,
    even if the test failed."""
    yield (studies := InstantStudies(cluster, tmp_path))
    cluster.command_output("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    studies.end()
