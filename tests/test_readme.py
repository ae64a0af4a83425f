"""The README names every option that exists."""

from pathlib import Path

import pytest

from kvcommon.config import ConnectorConfig, DaemonConfig, MooncakeConfig

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", [*ConnectorConfig.__struct_fields__])
def test_options_of_the_connector(name: str) -> None:
    assert f"`{name}`" in README


@pytest.mark.parametrize(
    "name", [name for name in DaemonConfig.__struct_fields__ if name != "heartbeat_ms"]
)
def test_options_of_the_daemon(name: str) -> None:
    assert f"--{name.replace('_', '-')}" in README


@pytest.mark.parametrize("name", [*MooncakeConfig.__struct_fields__])
def test_settings_of_mooncake(name: str) -> None:
    assert f"`{name}`" in README
