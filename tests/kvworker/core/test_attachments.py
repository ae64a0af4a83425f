"""Attaching, replacing and letting go of a rank's memory."""

import msgspec

from kvcommon.messages import Attached, Detach, JobOutcome, Refused, Welcome
from kvworker.core.commands import (
    Cancel,
    CloseGets,
    ClosePuts,
    LoadLayers,
    MapEngine,
    OpenGets,
    OpenPuts,
    UnmapEngine,
    WriteLayers,
)
from kvworker.outcome import Outcome
from tests.support.playbook import (
    MODEL,
    NAMESPACE,
    Playbook,
    attach,
    ends,
    group_layout,
    key,
    kinds,
    load,
    only,
    said,
    save,
    started,
)

NEXT = MODEL + 1


def test_attach_then_hello() -> None:
    play = Playbook()
    commands = play.model(attach())
    assert kinds(commands) == ["MapEngine"]
    commands = play.answer(commands[0], capabilities=("direct",))
    assert kinds(commands) == ["Attached → model"]
    assert said(commands, Attached) == Attached(pid=77, capabilities=("direct",))
    assert said(play.hello(), Welcome).attached


def test_hello_then_attach() -> None:
    play = Playbook(event_log="/log")
    welcome = said(play.hello(), Welcome)
    assert welcome == Welcome(
        pid=77, device="cpu:0", attached=False, store="memory", event_log="/log"
    )
    commands = play.answer(only(play.model(attach()), MapEngine))
    assert kinds(commands) == ["Attached → model", "Welcome → scheduler"]
    assert said(commands, Welcome).attached


def test_attach_for_another_device_is_refused() -> None:
    commands = Playbook().model(attach(device="npu:1"))
    refused = said(commands, Refused)
    assert "cpu:0" in refused.reason
    assert "npu:1" in refused.remedy
    assert not refused.resync


def test_an_impossible_layout_is_refused() -> None:
    twice = attach(groups=(group_layout(), group_layout()))
    hollow = attach(groups=(group_layout(num_layers=0),))
    for body in (twice, hollow):
        assert kinds(Playbook().model(body)) == ["Refused → model"]


def test_what_cannot_be_mapped_is_refused() -> None:
    play = Playbook()
    play.hello()
    commands = play.answer(only(play.model(attach()), MapEngine), error="no", remedy="do")
    assert kinds(commands) == ["Refused → model"]
    assert said(commands, Refused) == Refused(reason="no", remedy="do")
    assert kinds(play.model(attach())) == ["MapEngine"], "it may try again"


def test_the_same_attach_again_is_answered_again() -> None:
    play = started()
    assert kinds(play.model(attach())) == ["Attached → model"]


def test_the_same_attach_again_while_it_is_mapped_is_answered_once() -> None:
    play = Playbook()
    mapping = only(play.model(attach()), MapEngine)
    assert play.model(attach()) == []
    assert kinds(play.answer(mapping)) == ["Attached → model"]


def test_other_memory_of_the_same_incarnation_is_mapped_anew() -> None:
    play = started()
    commands = play.model(attach(address=1 << 20))
    assert kinds(commands) == ["UnmapEngine", "Welcome → scheduler"]


def test_a_new_incarnation_replaces_the_old() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    play.answer(only(play.plan(2, load(2, {5: 50})), OpenGets))
    commands = play.model(attach(), epoch=NEXT)
    assert kinds(commands) == [
        "CloseGets",
        "UnmapEngine",
        "Welcome → scheduler",
        "JobsEnded → scheduler",
        "JobsEnded → scheduler",
    ]
    assert not said(commands, Welcome).attached
    assert {end.outcome for end in ends(commands).values()} == {JobOutcome.CANCELLED}
    commands = play.answer(only(commands, UnmapEngine))
    assert kinds(commands) == ["MapEngine"]
    commands = play.answer(commands[0])
    assert kinds(commands) == ["Attached → model", "Welcome → scheduler"]
    assert play.begin(1) == [], "the old incarnation is not heard any more"


def test_steps_of_the_new_incarnation_are_counted_anew() -> None:
    play = started()
    play.begin(500)
    play.answer(only(play.model(attach(), epoch=NEXT), UnmapEngine))
    play.answer(play.log[-1][1][0])
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets))
    assert kinds(play.begin(1, epoch=NEXT)) == ["LoadLayers"]


def test_a_third_incarnation_while_the_first_is_unmapped() -> None:
    play = started()
    unmapping = only(play.model(attach(), epoch=NEXT), UnmapEngine)
    last = attach(address=1 << 20)
    assert play.model(last, epoch=NEXT + 1) == []
    assert only(play.answer(unmapping), MapEngine).attach == last


def test_a_new_incarnation_while_the_old_is_mapped() -> None:
    play = Playbook()
    mapping = only(play.model(attach()), MapEngine)
    assert play.model(attach(), epoch=NEXT) == []
    commands = play.answer(mapping)
    assert kinds(commands) == ["UnmapEngine"], "the old one is never welcomed"
    assert kinds(play.answer(commands[0])) == ["MapEngine"]


def test_a_new_incarnation_while_the_old_cannot_be_mapped() -> None:
    play = Playbook()
    mapping = only(play.model(attach()), MapEngine)
    play.model(attach(), epoch=NEXT)
    assert kinds(play.answer(mapping, error="no")) == ["MapEngine"]


def test_a_model_side_lost_while_it_is_mapped() -> None:
    play = Playbook()
    mapping = only(play.model(attach()), MapEngine)
    assert play.lose("model") == []
    commands = play.answer(mapping)
    assert kinds(commands) == ["UnmapEngine"]
    assert play.answer(commands[0]) == []


def test_a_model_side_lost_while_it_cannot_be_mapped() -> None:
    play = Playbook()
    mapping = only(play.model(attach()), MapEngine)
    play.lose("model")
    assert play.answer(mapping, error="it is gone") == []


def test_a_model_side_lost_while_it_waits() -> None:
    play = started()
    unmapping = only(play.model(attach(), epoch=NEXT), UnmapEngine)
    assert play.lose("model", epoch=NEXT) == []
    assert play.answer(unmapping) == []


def test_the_loss_of_an_old_incarnation_means_nothing() -> None:
    play = started()
    assert play.lose("model", epoch=MODEL - 1) == []
    assert play.lose("model", engine="unknown#0") == []
    assert said(play.hello(), Welcome).attached


def test_a_model_side_lost_with_everything_in_flight() -> None:
    play = started()
    play.begin(1)
    play.computed(1)
    writing = only(play.answer(only(play.plan(1, save(1, {4: 40})), OpenPuts)), WriteLayers)
    opening = only(play.plan(1, save(2, {5: 50})), OpenPuts)
    loading = only(play.answer(only(play.plan(1, load(3, {6: 60})), OpenGets)), LoadLayers)
    getting = only(play.plan(1, load(4, {7: 70})), OpenGets)
    play.plan(2, save(5, {8: 80}))
    commands = play.lose("model")
    assert [c.op for c in commands if isinstance(c, Cancel)] == [
        writing.op,
        opening.op,
        loading.op,
        getting.op,
    ]
    order = kinds(commands)
    assert order.index("UnmapEngine") > max(i for i, kind in enumerate(order) if kind == "Cancel")
    assert not said(commands, Welcome).attached
    assert list(ends(commands)) == [5], "nothing of it is in flight"
    assert ends(commands, "model") == {}

    commands = play.answer(opening)
    assert only(commands, ClosePuts).revoke == (key(50),), "it opened after all"
    assert list(ends(commands)) == [2]
    commands = play.answer(getting)
    assert only(commands, CloseGets).keys == (key(70),)
    assert list(ends(commands)) == [4]
    commands = play.answer(writing, Outcome.CANCELLED)
    assert only(commands, ClosePuts).revoke == (key(40),)
    assert list(ends(commands)) == [1]
    commands = play.answer(loading, Outcome.CANCELLED)
    assert ends(commands)[3].reason == "engine-lost"
    assert ends(commands, "model") == {}


def test_no_page_of_memory_that_is_gone_is_written() -> None:
    play = started()
    gets = only(play.plan(1, load(1, {4: 40}, layerwise=True)), OpenGets)
    play.lose("model")
    assert "PublishProgress" not in kinds(play.answer(gets, Outcome.CANCELLED))


def test_detach_cancels_the_jobs_and_frees_the_memory() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    commands = play.model(Detach(reason="shutdown"))
    assert kinds(commands) == ["UnmapEngine", "Welcome → scheduler", "JobsEnded → scheduler"]
    assert ends(commands)[1].reason == "cancelled"
    assert play.model(Detach()) == [], "it has left already"


def test_a_publication_in_flight_is_not_stopped_by_the_loss_of_the_model() -> None:
    play = started()
    play.begin(1)
    play.computed(1)
    write = only(play.answer(only(play.plan(1, save(1, {4: 40})), OpenPuts)), WriteLayers)
    play.answer(write)
    close = only(play.verdict(1), ClosePuts)
    assert kinds(play.lose("model")) == ["UnmapEngine", "Welcome → scheduler"]
    assert ends(play.answer(close))[1].outcome is JobOutcome.DONE


def test_an_unknown_model_side_is_asked_to_attach() -> None:
    refused = said(Playbook().begin(1), Refused)
    assert refused.resync
    assert "Attach" in refused.remedy


def test_differences_to_the_nearest_namespace() -> None:
    play = Playbook()
    far = msgspec.structs.replace(NAMESPACE, model="other", revision="9", dtype="x")
    near = msgspec.structs.replace(NAMESPACE, dtype="bfloat16")

    def lines(number: int, namespace: object) -> tuple[str, ...]:
        body = attach(namespace=namespace)  # type: ignore[arg-type]
        commands = play.model(body, engine=f"e{number}#0")
        return said(play.answer(only(commands, MapEngine)), Attached).differences

    assert lines(1, far) == (), "the first"
    assert len(lines(2, NAMESPACE)) == 3
    assert lines(3, near) == ("dtype: 'bfloat16', not 'float32'",)
    assert lines(4, NAMESPACE) == (), "known"


def test_namespaces_are_forgotten_beyond_the_bound() -> None:
    play = Playbook(max_namespaces=1)
    for number in range(3):
        namespace = msgspec.structs.replace(NAMESPACE, revision=str(number % 2))
        commands = play.model(attach(namespace=namespace), engine=f"e{number}#0")
        attached = said(play.answer(only(commands, MapEngine)), Attached)
    assert len(attached.differences) == 1, "the first was forgotten when the second came"
