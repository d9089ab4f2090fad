from __future__ import annotations

from pathlib import Path

import pytest

from ft_hsdp.errors import ConfigError
from ft_hsdp.mounts import Mount
from lighthouse import store


@pytest.mark.parametrize(("kind", "refused"), [("nfs4", True), ("cifs", True), ("ext4", False), ("9p", False)])
def test_a_network_file_system_is_no_place_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    """Two lighthouses on two machines could both have its lock."""
    monkeypatch.setattr(store, "mount_of", lambda path: Mount(tmp_path, kind, ()))
    if refused:
        with pytest.raises(ConfigError, match=rf"{kind}, where locks may fail\), or lighthouse\.etcd"):
            store.SqliteStore(tmp_path / "store.sqlite")
        assert not (tmp_path / "store.sqlite").exists()
    else:
        store.SqliteStore(tmp_path / "store.sqlite").close()
