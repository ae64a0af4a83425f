"""The page, as data and in a real browser."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvreplay import report
from kvreplay.loading import LogSet, open_logs
from kvreplay.requests import read_requests
from kvreplay.story import tell
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.outcome import Outcome
from tests.kvreplay.pair import Pair
from tests.kvreplay.test_broken_cores import double_end
from tests.kvreplay.test_faults import outcomes
from tests.support.browser import Browser, find_browser

NAMES = ["first", "hit", "fails", "evil</script><img src=x onerror=alert(1)>"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> LogSet:
    pair = Pair(tmp_path_factory.mktemp("logs"))
    pair.put("old", 6)
    pair.serve(NAMES[0], 100, "new", step=1)
    pair.serve(NAMES[1], 100, "new", step=4)
    pair.answer = outcomes(work_do.LoadLayers, 3, outcome=Outcome.FAILED)
    pair.serve(NAMES[2], 100, "old", step=7)
    pair.serve(NAMES[3], 100, "x", step=10)
    return pair.close()


@pytest.fixture(scope="module")
def page(logs: LogSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.make_report(logs), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium in CI: make setup installs it")
        pytest.skip("no Chromium here: apt-get install chromium")
    with Browser(binary) as running:
        yield running


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    browser.size(1280, 900)
    browser.open(f"{page.as_uri()}?{os.urandom(4).hex()}")
    yield browser
    assert browser.complaints == []


def text(browser: Browser, selector: str) -> str:
    return str(browser.get(f"document.querySelector({selector!r}).innerText"))


def rows(browser: Browser) -> list[str]:
    names = browser.get(
        "[...document.querySelectorAll('#rows tr td:first-child')].map(x => x.innerText)"
    )
    return list(names)


def test_the_data_is_what_the_logs_say(logs: LogSet) -> None:
    data = report.collect(logs)
    assert [one["id"] for one in data["requests"]] == NAMES
    assert [one["outcome"] for one in data["requests"]] == ["miss", "hit", "failed-load", "miss"]
    for one in data["requests"]:
        assert one["sentence"] == tell(logs, one["id"]).sentence
    assert data["check_kind"] == "good"
    kinds = {data["kinds"][one[3]] for one in data["slices"]}
    assert {"plan", "FindKeys", "LoadLayers", "WriteLayers"} <= kinds
    mine = [one for one in data["slices"] if 1 in one[5]]
    assert {data["kinds"][one[3]] for one in mine} >= {"OpenGets", "LoadLayers", "CloseGets"}
    assert all(one[0] < len(data["tracks"]) for one in data["slices"])


def test_the_page_is_one_file_without_anything_from_outside(page: Path) -> None:
    html = page.read_text("utf-8")
    assert "default-src 'none'" in html
    assert not re.search(
        r"""(src|href)\s*=\s*["'](?!x)|@import|url\(""", html.split('id="data"')[0]
    )
    assert "<img src=x" not in html
    (raw,) = re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert json.loads(raw)["requests"][3]["id"] == NAMES[3]


def test_broken_rules_are_shown_first(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    double_end(pair)
    data = report.collect(pair.close())
    assert data["check_kind"] == "bad"
    assert "1 rule violation" in data["check"]
    assert any("job 1 ended twice" in line and kind == "bad" for line, kind in data["logs"])


def damaged(logs: LogSet, directory: Path) -> LogSet:
    for log in logs.logs:
        for part in log.parts:
            data = bytearray(part.path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            (directory / part.path.name).write_bytes(data)
    return open_logs([directory])


def test_what_could_not_be_checked_is_said(logs: LogSet, tmp_path: Path) -> None:
    data = report.collect(damaged(logs, tmp_path))
    assert data["check_kind"] == "warn"
    assert any("wrong checksum" in line and kind == "warn" for line, kind in data["logs"])


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_REQUESTS", "MAX_SLICES", "MAX_LINES"):
        monkeypatch.setattr(report, name, 3)
    pair = Pair(tmp_path)
    for number in range(5):
        pair.add(f"r{number}", 100, "x")
    pair.say(sched.RequestFinished, request_id="r0")
    data = report.collect(pair.close())
    assert (len(data["requests"]), data["requests_left_out"]) == (3, 2)
    assert len(data["slices"]) == 3
    assert data["slices_left_out"] > 0
    assert max(len(one["lines"]) for one in data["requests"]) == 3


def test_requests_beyond_those_that_are_read_are_counted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "read_requests", lambda logs: read_requests(logs, 3))
    monkeypatch.setattr(report, "MAX_REQUESTS", 2)
    pair = Pair(tmp_path)
    for number in range(5):
        pair.add(f"r{number}", 100, "x")
    data = report.collect(pair.close())
    assert (len(data["requests"]), data["requests_left_out"]) == (2, 3)
    assert ("Requests", "5") in data["numbers"]


def test_a_click_on_a_request_tells_its_story(
    opened: Browser, logs: LogSet, tmp_path: Path
) -> None:
    assert "every command comes again" in text(opened, "#check")
    assert text(opened, "#cut") == ""
    assert rows(opened) == NAMES
    assert opened.get("document.querySelector('#story').hidden")
    opened.click("#rows tr:nth-child(3)")
    assert text(opened, "#name") == "fails"
    told = tell(logs, "fails")
    assert text(opened, "#sentence") == told.sentence
    assert "transfer-failed" in told.sentence
    lines = opened.get("[...document.querySelectorAll('#lines li')].map(x => x.innerText)")
    assert len(lines) == len(told.lines)
    assert any("layers loaded: 5 ok, 1 failed" in line for line in lines)
    assert opened.get("location.hash") == "#fails"
    opened.screenshot(tmp_path / "story.png")
    assert (tmp_path / "story.png").stat().st_size > 20_000


def test_by_keyboard_alone(opened: Browser) -> None:
    opened.press("/", "/")
    assert opened.get("document.activeElement.id") == "search"
    opened.type("evicted lease transfer-failed")
    assert rows(opened) == []
    opened.get("document.querySelector('#search').select()")
    opened.type("TRANSFER-failed  load")
    assert rows(opened) == ["fails"]
    assert text(opened, "#count") == "1 of 4"
    opened.get("document.querySelector('#search').select()")
    opened.press("Backspace")
    opened.type("r")
    opened.get("document.querySelector('#rows tr').focus()")
    opened.press("ArrowDown")
    opened.press("Enter")
    assert text(opened, "#name") == rows(opened)[1]
    assert opened.get("document.activeElement.id") == "name"
    opened.press("Escape")
    assert opened.get("document.querySelector('#story').hidden")
    assert opened.get("document.activeElement.tagName") == "TR"


def test_the_outcome_filter(opened: Browser) -> None:
    opened.get(
        "(() => { const s = document.querySelector('#outcome'); s.value = 'miss';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    assert rows(opened) == [NAMES[0], NAMES[3]]


def test_a_click_on_the_timeline_opens_the_request_that_it_is_for(opened: Browser) -> None:
    data: dict[str, Any] = opened.get("JSON.parse(document.querySelector('#data').textContent)")
    load = next(
        one for one in data["slices"] if data["kinds"][one[3]] == "LoadLayers" and 1 in one[5]
    )
    end = max([one[1] + one[2] for one in data["slices"]] + [one[1] for one in data["marks"]])
    opened.get("document.querySelector('#time').scrollIntoView()")
    opened.click("[data-do=all]")
    x, y, width = opened.get(
        "(() => { const b = document.querySelector('#canvas').getBoundingClientRect();"
        " return [b.x, b.y, b.width]; })()"
    )
    label = min(230, round(width * 0.3))
    at = x + label + (load[1] + load[2] / 2) / (end * 1.02) * (width - label)
    opened.click_at(at, y + 22 + load[0] * 18 + 9)
    assert text(opened, "#name") == "hit"
    assert "load layers 0-2 into 6 blocks" in text(opened, "#tip")
    assert "(hit)" in text(opened, "#tip")


def test_the_timeline_zooms_and_moves_by_keys_and_buttons(opened: Browser) -> None:
    def picture() -> str:
        return str(opened.get("document.querySelector('#canvas').toDataURL()"))

    busy = picture()
    opened.get("document.querySelector('#scroll').focus()")
    opened.press("a", "a")
    whole = picture()
    assert whole != busy, "at first only what requests did is shown"
    opened.press("+", "+")
    near = picture()
    assert near != whole
    opened.press("ArrowRight")
    assert picture() != near
    opened.press("a", "a")
    assert picture() == whole
    opened.click("[data-do=in]")
    assert picture() == near
    opened.click("[data-do=all]")


def test_a_page_that_was_cut_says_what_is_missing(
    browser: Browser, logs: LogSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_REQUESTS", 3)
    monkeypatch.setattr(report, "MAX_SLICES", 5)
    path = tmp_path / "cut.html"
    path.write_text(report.make_report(logs), "utf-8")
    browser.open(path.as_uri())
    assert text(browser, "#count") == "3 of 3; 1 later left out"
    said = re.fullmatch(
        r"up to about ([\d.]+) ms; (\d+) later operations and marks are left out",
        text(browser, "#cut"),
    )
    assert said
    assert float(said[1]) > 0
    assert int(said[2]) > 20


def test_it_fits_a_small_and_a_dark_screen(opened: Browser, tmp_path: Path) -> None:
    opened.size(360, 740, mobile=True, dark=True)
    opened.wait("document.documentElement.scrollWidth <= 360")
    opened.click("#rows tr:nth-child(2)")
    assert opened.get("document.documentElement.scrollWidth") <= 360
    low = opened.get(
        "Math.min(...[...document.querySelectorAll('button')].filter(b => b.offsetHeight)"
        ".map(b => b.offsetHeight))"
    )
    assert low >= 44
    assert opened.get("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    opened.screenshot(tmp_path / "small.png")
    opened.get("document.querySelector('#time').scrollIntoView()")
    opened.screenshot(tmp_path / "small-time.png")


def test_a_link_to_a_request_opens_it(browser: Browser, page: Path) -> None:
    browser.open(f"{page.as_uri()}?x#hit")
    assert text(browser, "#name") == "hit"


def test_text_of_a_log_stays_text(opened: Browser) -> None:
    opened.click("#rows tr:nth-child(4)")
    assert text(opened, "#name") == NAMES[3]
    assert opened.get("document.querySelectorAll('img').length") == 0


def test_requests_are_the_first_tracks(logs: LogSet) -> None:
    data = report.collect(logs)
    titles = [name for _, name, first in data["tracks"] if first]
    assert titles == ["requests", "kvsched-eng1", "kvworker-cpu-0"]
    drawn = [one for one in data["slices"] if data["kinds"][one[3]] == "request"]
    assert [one[5] for one in drawn] == [[0], [1], [2], [3]]


def test_lanes_stand_in_order_of_their_numbers() -> None:
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": tid, "args": {"name": f"lane {number}"}}
        for tid, number in enumerate((10, 2, 1))
    ]
    tracks = report._timeline(events, ["a"], {})["tracks"]
    assert [name for _, name, first in tracks if not first] == ["lane 1", "lane 2", "lane 10"]


def test_times_beyond_all_measure_do_not_hang_the_page(
    browser: Browser, logs: LogSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So far out that a step of the ruler does not change a number."""
    data = report.collect(logs)
    _, _, length, *rest = data["slices"][0]
    far = [(0, 2**64 // 1000, length, rest[0], rest[1], [0])]
    monkeypatch.setattr(report, "collect", lambda _logs: {**data, "slices": far, "marks": []})
    path = tmp_path / "far.html"
    path.write_text(report.make_report(logs), "utf-8")
    browser.open(path.as_uri())
    for _ in range(8):
        browser.get("document.querySelector('[data-do=in]').click()")
    assert text(browser, "#check").startswith("Checked")
