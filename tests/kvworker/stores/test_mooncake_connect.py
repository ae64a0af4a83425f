import importlib
import socket

import pytest

from kvcommon.config import MooncakeConfig
from kvcommon.errors import StoreError, StoreUnreachable
from kvworker.stores import mooncake_connect
from kvworker.stores.mooncake_connect import connect as connect_client
from kvworker.stores.mooncake_connect import load_library, local_copies


class NoLibrary:
    """Stands where the library would be: these tests end before it is asked."""


def _connect(**options: str) -> None:
    connect_client(NoLibrary, MooncakeConfig(**options), 0)  # type: ignore[arg-type]


def test_a_missing_master_is_named_with_the_way_to_start_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StoreUnreachable, match=f"127.0.0.1:{port}.*--rpc_port {port}"):
        _connect(master_server_address=f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        ":1",
        "host:",
        "host:port",
        "host:0",
        "host:65536",
        "two..dots:1",
        f"{'x' * 64}:1",
    ],
)
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(StoreError, match="HOST:PORT"):
        _connect(master_server_address=address)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_name_is_refused_when_the_master_is_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_connect, "_peer", lambda host, port: "192.0.2.7")
    with pytest.raises(StoreError, match="local_hostname"):
        _connect(master_server_address="192.0.2.7:50051", local_hostname=name)


def test_a_library_that_is_missing_or_broken_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    def broken(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(StoreError, match=r"kvferry\[cpu\]"):
        load_library()
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(StoreError, match="libibverbs1"):
        load_library()


@pytest.mark.parametrize(
    ("protocol", "switch", "answer"),
    [("tcp", "", True), ("rdma", "", False), ("tcp", "0", False), ("rdma", "1", True)],
)
def test_when_the_library_copies_by_memory(
    protocol: str, switch: str, *, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_STORE_MEMCPY", switch)
    assert local_copies(protocol) is answer
