"""The core's configuration is part of its log: it survives the trip and has sane defaults."""

import msgspec

from kvworker.core.config import CoreConfig


def test_it_survives_the_log() -> None:
    config = CoreConfig(device="npu:1", store="mooncake", pid=3, step_memory=7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=CoreConfig) == config


def test_what_ended_is_remembered_longer_than_anything_stays_open() -> None:
    config = CoreConfig(device="cpu:0", store="memory")
    assert config.ended_memory >= config.max_open_jobs
