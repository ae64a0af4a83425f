import inspect
from typing import get_args, get_type_hints

from kvcommon.config import DaemonConfig
from kvworker import options
from kvworker.cli import serve

#: Settings that nobody needed to change on a command line.
NOT_OFFERED = {"heartbeat_ms"}


def test_every_setting_of_the_daemon_has_an_option_and_none_has_two() -> None:
    offered = set(inspect.signature(serve).parameters)
    assert set(DaemonConfig.__struct_fields__) - NOT_OFFERED <= offered


def test_every_option_says_what_it_does() -> None:
    hints = get_type_hints(serve, include_extras=True)
    for name, hint in hints.items():
        if name != "return":
            (described,) = [extra for extra in get_args(hint)[1:] if hasattr(extra, "help")]
            assert described.help, name


def test_choices_are_those_of_the_configuration() -> None:
    hints = get_type_hints(DaemonConfig, include_extras=True)
    for field, choices in (
        ("store", options.StoreKind),
        ("save", options.SaveMode),
        ("event_log_mode", options.LogMode),
    ):
        allowed = get_args(hints[field])
        assert sorted(choice.value for choice in choices) == sorted(allowed), field
