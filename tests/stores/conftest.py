import pytest

from ebbtide._stores import _scratch, disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder accepted by the disk store on every machine: RAM is as good as a disk for tests."""
    monkeypatch.setattr(disk, "_MOUNTS", tmp_path / "no-such-list-of-mounts")
    return tmp_path


@pytest.fixture
def cached_only(monkeypatch):
    """The file system refuses O_DIRECT."""
    monkeypatch.setattr(_scratch, "_set_direct", lambda fd: False)
