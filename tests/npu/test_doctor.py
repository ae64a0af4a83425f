"""``kvworker doctor`` with a card: it opens, and memory and events are shared for real."""

import subprocess

import pytest

from tests.support.daemonproc import command, environment


def doctor(*options: str, **environ: str) -> tuple[int, str]:
    """Exit status and what is printed, as from a shell."""
    done = subprocess.run(
        command("doctor", "--device", "npu:0", "--store", "memory", *options),
        env={**environment(), **environ},
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    return done.returncode, done.stdout


def test_a_card_that_works() -> None:
    _, text = doctor()
    assert "ok    card: npu:0, 1.00 of 1.00 GiB free" in text
    assert "ok    sharing memory" in text
    assert "ok    sharing events: works" in text


@pytest.mark.parametrize(
    ("environ", "line", "remedy"),
    [
        ({"CANN_DOUBLE_IPC_EVENTS": "0"}, "warn  sharing events", "26.0.RC1"),
        ({"CANN_DOUBLE_UUID": "0"}, "warn  uuid", "same cards to see"),
        (
            {"ASCEND_RT_VISIBLE_DEVICES": "1"},
            "FAIL  card: device npu:0: this process sees",
            "npu-smi",
        ),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
            "FAIL  sharing memory: the KV cache lies in expandable segments",
            "mode: inline",
        ),
    ],
)
def test_what_is_broken_is_named(environ: dict[str, str], line: str, remedy: str) -> None:
    _, text = doctor(**environ)
    assert line in text
    assert remedy in text[text.index(line) :]
