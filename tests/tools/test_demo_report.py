"""The demo's verdict can fail: each thing that must be so is missed when it is not."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import apiclient
import demo_report
import dialogue

FULL = 20 * dialogue.BLOCK_TOKENS


def turn(
    *, local: int = 0, external: int = 0, shift: float = 0.0, text: str = " so"
) -> dialogue.Turn:
    reply = apiclient.Reply(
        request_id="chatcmpl-1",
        text=text,
        tokens=(text,),
        logprobs=(-1.0 + shift,),
        num_prompt_tokens=FULL + 50,
        num_cached_tokens=local + external,
        first_token_s=0.1,
        finish_reason="length",
    )
    return dialogue.Turn(reply=reply, num_external=external)


def results() -> demo_report.Results:
    """A demo in which all is well, one turn each."""
    found = demo_report.Results(reference=[turn()], control=turn(text=" no"))
    found.add("vLLM alone", found.reference)
    found.add("cold", [turn()])
    found.add("local hit", [turn(local=FULL)])
    found.add("external hit", [turn(external=FULL)])
    found.add("fresh engine", [turn(external=FULL, shift=5e-5)])
    return found


def test_all_is_well() -> None:
    assert demo_report.problems(results()) == []
    assert demo_report.table(results()).row_count == 6


@pytest.mark.parametrize(
    ("name", "other", "what"),
    [
        ("cold", turn(text=" no"), "cold, turn 1: ' no', not ' so'"),
        ("local hit", turn(local=FULL, shift=2e-4), "logprobs differ by 0.0002"),
        ("cold", turn(external=FULL), "came from the store, not 0"),
        ("local hit", turn(local=FULL - 128, external=128), "2432 tokens came from the local"),
        ("external hit", turn(external=FULL - 128), "2432 tokens came from a cache, not 2560"),
        ("external hit", turn(local=128, external=FULL - 128), "128 tokens came from the local"),
        ("fresh engine", turn(), "0 tokens came from a cache, not 2560"),
    ],
)
def test_what_differs_is_said(name: str, other: dialogue.Turn, what: str) -> None:
    found = results()
    found.turns[name] = [other]
    assert any(what in line for line in demo_report.problems(found))


def test_the_control_must_differ() -> None:
    found = dataclasses.replace(results(), control=turn())
    assert any("control" in line for line in demo_report.problems(found))
    found = dataclasses.replace(results(), control=None)
    assert any("control" in line for line in demo_report.problems(found))


def test_clean_leaves_the_model(tmp_path: Path) -> None:
    for name in ("logs/a.kvlog", "model/config.json", "trace.json", "vllm-first.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    demo_report.clean(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"model/config.json"}


def test_mooncake_config_is_one_that_kvferry_reads(tmp_path: Path) -> None:
    from kvcommon.config import mooncake_config

    path = demo_report.write_mooncake_config(tmp_path, "127.0.0.1:1", 1 << 30)
    read = mooncake_config(str(path), {})
    assert read.master_server_address == "127.0.0.1:1"
    assert json.loads(path.read_text())["protocol"] == "tcp"


@pytest.mark.parametrize("change", [lambda text: text + ".", lambda text: text])
def test_logprob_gap(change: Callable[[str], str]) -> None:
    one, two = turn(), turn(text=change(" so"), shift=1e-6)
    gap = dialogue.largest_gap(two, one)
    if one.reply.tokens == two.reply.tokens:
        assert gap == pytest.approx(1e-6)
        assert dialogue.is_same(two, one)
    else:
        assert gap == float("inf")
        assert not dialogue.is_same(two, one)


def test_system_prompts_differ_from_the_first_block_on() -> None:
    one, two = dialogue.system_prompt(), dialogue.system_prompt("the other ferry")
    assert one[:40] != two[:40]
    assert len(one) > 4000
