"""The words in the module and on the page are the same."""

import re
from pathlib import Path

from kvcommon import reasons

PAGE = Path(__file__).parents[2] / "docs" / "reasons.md"


def test_page_and_module_list_the_same_words_in_the_same_order() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert tuple(rows) == reasons.REASONS


def test_every_constant_is_listed_once() -> None:
    constants = [
        value
        for name, value in vars(reasons).items()
        if name.isupper() and name != "REASONS" and isinstance(value, str)
    ]
    assert sorted(constants) == sorted(reasons.REASONS)
    assert len(set(reasons.REASONS)) == len(reasons.REASONS)


def test_a_constant_is_spelt_like_its_word() -> None:
    for word in reasons.REASONS:
        assert getattr(reasons, word.upper().replace("-", "_")) == word
