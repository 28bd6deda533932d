"""Nothing that another user could open, and nothing that a network could reach."""

import stat
from pathlib import Path

import pytest
from fakes import CountingEnv
from oracle import uniform
from processes import children, descriptors, mappings

from asyncmaml import AsyncSampler


def inodes_in(table: str) -> set[str]:
    """Return the sockets of a network protocol that there are, ours and others."""
    path = Path(f"/proc/net/{table}")
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return {f"socket:[{line.split()[9]}]" for line in lines}


def named_unix_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {f"socket:[{fields[6]}]" for line in lines if len(fields := line.split()) > 7}


async def test_workers_are_reached_by_what_has_no_name_and_no_address() -> None:
    before = set(descriptors().values())
    async with AsyncSampler(CountingEnv, num_workers=1, batch_size=2) as sampler:
        await sampler.sample(uniform)
        (worker,) = children()
        ours = set(descriptors().values()) - before
        theirs = set(descriptors(worker).values())
        maps = mappings(worker)
    sockets = {name for name in ours | theirs if name.startswith("socket:")}
    assert sockets
    for table in ("tcp", "tcp6", "udp", "udp6", "raw"):
        assert not sockets & inodes_in(table)
    assert not (ours & sockets) & named_unix_sockets()
    kinds = {name.partition(":")[0] for name in ours}
    assert kinds <= {"socket", "pipe", "anon_inode", "/memfd"}
    assert "/memfd:asyncmaml (deleted)" in maps


@pytest.mark.usefixtures("fork_server")
def test_socket_of_the_fork_server_is_the_users_alone() -> None:
    from multiprocessing import forkserver

    path = Path(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
