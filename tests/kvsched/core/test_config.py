import msgspec

from kvsched.core.config import CoreConfig


def test_times_are_kept_in_milliseconds_and_used_in_nanoseconds() -> None:
    config = CoreConfig(lookup_timeout_ms=0.5, lookup_fresh_ms=2, ack_timeout_ms=3)
    assert config.lookup_timeout_ns == 500_000
    assert config.lookup_fresh_ns == 2_000_000
    assert config.ack_timeout_ns == 3_000_000


def test_a_log_header_can_hold_it_and_older_logs_can_be_read() -> None:
    config = CoreConfig(block_size=128, load="async", save_decode=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=CoreConfig) == config
    newer = msgspec.msgpack.encode({"block_size": 8, "a_later_field": 1})
    assert msgspec.msgpack.decode(newer, type=CoreConfig) == CoreConfig(block_size=8)
