"""The thread that keeps a daemon informed of our memory, against a daemon of the test's own."""

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvcommon.ids import EngineId, new_epoch
from kvcommon.memory.page import ProgressPage, expected_answer
from kvcommon.messages import (
    Attach,
    Attached,
    Detach,
    Heartbeat,
    JobEnd,
    JobOutcome,
    JobsEnded,
    Refused,
)
from kvsched import attachment as module
from kvsched.attachment import Attachment
from kvsched.link import DaemonLink
from tests.support.daemonproc import daemon as real_daemon
from tests.support.fakedaemon import FakeDaemon, until
from tests.support.fakemodel import FakeModel


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFUSED_S", 0.05)
    monkeypatch.setattr(module, "_BROKEN_S", 0.01)
    monkeypatch.setattr(module, "_RELEASE_S", 20.0)
    monkeypatch.setattr(module, "_ABSENT_S", 60.0)


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        yield running


@pytest.fixture
def model() -> Iterator[FakeModel]:
    made = FakeModel()
    yield made
    made.close()


def attach_to(
    endpoint: str,
    context: "zmq.Context[zmq.Socket[bytes]]",
    model: FakeModel,
    proofs: list[bool] | None = None,
    heartbeat_ms: float = 60_000,
) -> Attachment:
    """``proofs``: what the memory itself will say, attach by attach; None: it is not asked."""
    return Attachment(
        lambda: DaemonLink(context, endpoint, 0, "model"),
        EngineId("engine"),
        new_epoch(),
        export=model.attach,
        page=model.page,
        heartbeat_ms=heartbeat_ms,
        proven=(lambda: True) if proofs is None else proofs.pop,
    )


@pytest.fixture
def attachment(daemon: FakeDaemon, model: FakeModel) -> Iterator[Attachment]:
    made = attach_to(daemon.endpoint, daemon.context, model)
    yield made
    # Nothing to wait for where no daemon answers.
    made.attached = False
    made.close()
    assert not made._thread.is_alive()


def answer(daemon: FakeDaemon, model: FakeModel) -> Attach:
    """Take the next attach in, as a daemon that maps the memory does."""
    attach = daemon.hear(Attach)
    page = ProgressPage.open(attach.page)
    page.answer(expected_answer(page.nonce))
    page.close()
    daemon.attached()
    return attach


def becomes(attachment: Attachment, serving: int) -> None:
    """The thread takes it in."""
    waiting = threading.Event()
    until(lambda: attachment.serving == serving, lambda timeout_ms: waiting.wait(timeout_ms / 1e4))


def test_attaches_when_the_daemon_answers(
    daemon: FakeDaemon, model: FakeModel, attachment: Attachment
) -> None:
    assert attachment.serving == 0
    attach = answer(daemon, model)
    assert attach.layout == model.layout
    becomes(attachment, 1)
    assert attachment.attached
    assert attachment.generation == 1


def test_without_the_mark_in_the_page_it_is_not_attached(
    daemon: FakeDaemon, attachment: Attachment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="vllm.kvferry.attachment")
    daemon.hear(Attach)
    daemon.attached()
    until(lambda: "its mark is missing" in caplog.text, pause)
    assert attachment.serving == 0


def test_an_answer_to_an_earlier_attach_does_not_count(
    daemon: FakeDaemon,
    model: FakeModel,
    attachment: Attachment,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, logger="vllm.kvferry.attachment")
    answer(daemon, model)
    becomes(attachment, 1)
    daemon.say("model", Refused(reason="who?", resync=True))
    daemon.hear(Attach)
    # The page still holds what the first daemon wrote, had nobody wiped it.
    daemon.attached()
    until(lambda: "its mark is missing" in caplog.text, pause)
    assert attachment.serving == 0


def test_that_no_daemon_is_there_is_said_once(
    model: FakeModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kvferry.attachment")
    monkeypatch.setattr(module, "_ABSENT_S", 0.0)
    with FakeDaemon(bound=False) as daemon:
        attachment = attach_to(daemon.endpoint, daemon.context, model, heartbeat_ms=1)
        until(lambda: "no daemon" in caplog.text, pause)
        (line,) = caplog.messages
        assert f"no daemon at {daemon.endpoint}" in line
        assert "serves without the cache" in line
        assert f"kvworker serve --device cpu:0 --endpoint {daemon.endpoint}" in line
        monkeypatch.setattr(module, "_ABSENT_S", 60.0)
        daemon.start()
        # It has waited through many heartbeats, and said nothing more.
        answer(daemon, model)
        becomes(attachment, 1)
        assert len(caplog.messages) == 2
        assert "attached to the daemon" in caplog.messages[1]
        daemon.stop()
        becomes(attachment, 0)
        until(lambda: len(caplog.messages) == 3, pause)
        assert "waiting for it to come back" in caplog.messages[2]
        attachment.close()


def test_memory_that_the_daemon_does_not_see(
    daemon: FakeDaemon, model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="vllm.kvferry.attachment")
    attachment = attach_to(daemon.endpoint, daemon.context, model, proofs=[True, False])
    answer(daemon, model)
    until(lambda: "device memory" in caplog.text, pause)
    assert attachment.serving == 0
    daemon.say("model", Refused(reason="again", resync=True))
    answer(daemon, model)
    becomes(attachment, 1)
    attachment.attached = False
    attachment.close()


def test_a_daemon_that_comes_back_is_attached_to_again(
    daemon: FakeDaemon,
    model: FakeModel,
    attachment: Attachment,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kvferry.attachment")
    answer(daemon, model)
    becomes(attachment, 1)
    daemon.stop()
    becomes(attachment, 0)
    assert attachment.generation == 1
    daemon.start()
    answer(daemon, model)
    becomes(attachment, 2)
    assert "waiting for it to come back" in caplog.text


@pytest.mark.parametrize("how", ["gap", "resync"])
def test_a_broken_conversation_is_begun_again(
    daemon: FakeDaemon, model: FakeModel, attachment: Attachment, how: str
) -> None:
    answer(daemon, model)
    becomes(attachment, 1)
    if how == "gap":
        daemon.skip("model", Heartbeat())
        daemon.say("model", Heartbeat())
    else:
        daemon.say("model", Refused(reason="out of step", resync=True))
    answer(daemon, model)
    assert daemon.envelope is not None
    assert daemon.envelope.seq == 1
    becomes(attachment, 2)


def test_a_refusal_is_logged_once_and_tried_again(
    daemon: FakeDaemon,
    model: FakeModel,
    attachment: Attachment,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, logger="vllm.kvferry.attachment")
    for _ in range(3):
        daemon.hear(Attach)
        daemon.say("model", Refused(reason="device cpu:9", remedy="Start one for cpu:9."))
    answer(daemon, model)
    becomes(attachment, 1)
    assert caplog.text.count("device cpu:9") == 1
    assert "Start one for cpu:9." in caplog.text


def test_what_cannot_be_shared_is_told(
    daemon: FakeDaemon,
    model: FakeModel,
    attachment: Attachment,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.kvferry.attachment")
    attach = daemon.hear(Attach)
    model.page.answer(expected_answer(model.page.nonce))
    assert attach.lease_ms == 0
    daemon.say("model", Attached(pid=1, capabilities=("direct",), differences=("dtype: a != b",)))
    becomes(attachment, 1)
    assert attachment.capabilities == ("direct",)
    until(lambda: "cannot be used by this engine: dtype: a != b" in caplog.text, pause)


def test_a_message_of_another_conversation_changes_nothing(
    daemon: FakeDaemon,
    model: FakeModel,
    attachment: Attachment,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer(daemon, model)
    daemon.say("model", JobsEnded(ends=(JobEnd(job_id=1, outcome=JobOutcome.DONE),)))
    until(lambda: "job ends on the control conversation" in caplog.text, pause)
    assert attachment.serving == 1


def test_heartbeats_go_on_however_much_the_daemon_says(
    daemon: FakeDaemon, model: FakeModel
) -> None:
    attachment = attach_to(daemon.endpoint, daemon.context, model, heartbeat_ms=5)
    answer(daemon, model)
    for _ in range(3):
        # Its own heartbeats break every silence.
        daemon.say("model", Heartbeat())
        assert isinstance(daemon.hear_anything(), Heartbeat)
    attachment.attached = False
    attachment.close()


def test_heartbeats_flow_while_the_daemon_still_maps(daemon: FakeDaemon, model: FakeModel) -> None:
    """Mapping may take longer than the lease, and the lease counts from ``Attach`` on."""
    attachment = attach_to(daemon.endpoint, daemon.context, model, heartbeat_ms=5)
    daemon.hear(Attach)
    for _ in range(3):
        assert isinstance(daemon.hear_anything(), Heartbeat)
    assert attachment.generation == 0, "nobody has answered"
    attachment.close()


def test_heartbeats_inside_one_process_where_no_connection_is_reported(model: FakeModel) -> None:
    with FakeDaemon(bound=False) as daemon:
        daemon.endpoint = "inproc://kvferry-test"
        daemon.start()
        made = attach_to(daemon.endpoint, daemon.context, model, heartbeat_ms=1)
        answer(daemon, model)
        daemon.hear(Heartbeat)
        made.attached = False
        made.close()


def test_leaving_says_so_and_waits_until_the_memory_is_let_go(
    daemon: FakeDaemon, model: FakeModel
) -> None:
    attachment = attach_to(daemon.endpoint, daemon.context, model)
    answer(daemon, model)
    becomes(attachment, 1)
    closer = threading.Thread(target=attachment.close)
    closer.start()
    daemon.hear(Detach)
    assert closer.is_alive()
    model.page.answer(0)
    closer.join()
    assert not attachment._thread.is_alive()
    attachment.close()


def test_a_failed_export_ends_the_thread_and_nothing_else(
    daemon: FakeDaemon, model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    def export() -> Attach:
        raise OSError("no more memory")

    attachment = Attachment(
        lambda: DaemonLink(daemon.context, daemon.endpoint, 0, "model"),
        EngineId("engine"),
        new_epoch(),
        export=export,
        page=model.page,
        heartbeat_ms=1000,
    )
    attachment._thread.join()
    assert "serves without the cache" in caplog.text
    assert attachment.serving == 0
    attachment.close()


def test_whoever_hangs_up_on_everybody_is_not_complained_about(
    tmp_path: Path, model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        attachment = attach_to(f"ipc://{path}", context, model)
        for _ in range(5):
            server.accept()[0].close()
        attachment.close()
    context.term()
    assert "the daemon has gone" not in caplog.text
    assert attachment.generation == 0


def test_the_real_daemon(model: FakeModel) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with real_daemon() as running:
        attachment = attach_to(running.endpoint, context, model, heartbeat_ms=100)
        becomes(attachment, 1)
        assert running.has_mapped(model.inode)
        attachment.close()
        # It is let go before we may free it.
        assert not running.has_mapped(model.inode)
    context.term()


def pause(timeout_ms: float) -> None:
    """Let the thread go on for a moment."""
    threading.Event().wait(timeout_ms / 1e4)
