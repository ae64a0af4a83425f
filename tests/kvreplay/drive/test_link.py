"""Conversations with a real daemon."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommon.messages import Attached, Welcome
from kvreplay.drive import link as links
from kvreplay.drive.errors import DriveError
from kvreplay.drive.link import Link, Links
from tests.support.daemonproc import daemon
from tests.support.engine import hello
from tests.support.fakemodel import FakeModel


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvr") as name:
        yield Path(name)


def hear(talk: Links, count: int) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    while len(found) < count:
        found += [(link.channel.role, body) for link, body in talk.hear(5.0)]
    return found


def test_every_side_hears_its_own(directory: Path) -> None:
    with daemon(directory=directory) as running:
        talk, model = Links(), FakeModel()
        scheduler = talk.open(running.endpoint, "scheduler", "e", 0, 5)
        control = talk.open(running.endpoint, "model", "e", 0, 6)
        scheduler.say(hello())
        control.say(model.attach())
        found = hear(talk, 3)
        assert ("model", Attached) in [(role, type(body)) for role, body in found]
        assert [role for role, body in found if isinstance(body, Welcome)] == ["scheduler"] * 2
        talk.drop(control)
        talk.close()
        model.close()


def test_silence_is_broken_by_heartbeats(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_HEARTBEAT_S", 0.0)
    with daemon(directory=directory) as running:
        talk = Links()
        scheduler = talk.open(running.endpoint, "scheduler", "e", 0, 5)
        list(talk.hear(0.0))
        assert scheduler.channel.sent == 0, "nothing is said before the first message"
        scheduler.say(hello())
        hear(talk, 1)
        list(talk.hear(0.0))
        assert scheduler.channel.sent > 1
        talk.close()


def test_a_conversation_out_of_step_is_said(directory: Path) -> None:
    with daemon(directory=directory) as running:
        talk = Links()
        scheduler = talk.open(running.endpoint, "scheduler", "e", 0, 5)
        scheduler.say(hello())
        hear(talk, 1)
        scheduler.channel.received += 7
        scheduler.channel.peer_epoch += 1
        scheduler.say(hello())
        with pytest.raises(DriveError, match="scheduler of e#0 side is broken"):
            hear(talk, 1)
        talk.close()


def test_who_does_not_read_is_not_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_HIGH_WATER", 1)
    talk = Links()
    nobody = talk.open(f"ipc://{directory}/none-{os.getpid()}.sock", "scheduler", "e", 0, 5)

    def shout(link: Link) -> None:
        for _ in range(100):
            link.say(hello())

    with pytest.raises(DriveError, match="does not read"):
        shout(nobody)
    talk.close()
