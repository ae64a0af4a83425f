"""The demo's dialogue: a long system prompt, some turns, and what must be equal between runs."""

import dataclasses
from collections.abc import Callable, Sequence

import apiclient

ANSWER_TOKENS = 24
BLOCK_TOKENS = 128
#: Logprobs may differ by rounding: a prefix from a cache is computed in other tiles than a whole
#: prompt. KV that is not the right one changes them by far more.
TOLERANCE = 1e-4

_WHO = ("the captain", "the helmsman", "the engineer", "the cook", "the pilot", "the deck hand")
_WHAT = (
    "keeps a log of what was loaded",
    "counts every passenger twice",
    "waits for nobody who is late",
    "asks the harbour before leaving",
    "throws nothing overboard",
    "writes down why something was refused",
    "looks at the tide and the wind",
)
_WHEN = ("in the morning", "at night", "in every storm", "before the first bridge", "each evening")
QUESTIONS = (
    "Which harbour is the nearest, and who is waiting there?",
    "What did the captain write down about the missing cargo?",
    "How long does it take when the wind comes from the north?",
)


def system_prompt(title: str = "the ferry", rules: int = 96) -> str:
    """Return a system prompt of about 20 tokens per rule."""
    lines = [
        f"Rule {number + 1}: {_WHEN[number % len(_WHEN)]} {_WHO[number % len(_WHO)]} "
        f"{_WHAT[number % len(_WHAT)]}."
        for number in range(rules)
    ]
    return f"You are the assistant of {title}. Answer by these rules.\n" + "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One question and its answer on one engine."""

    reply: apiclient.Reply
    #: Prompt tokens that came from the store.
    num_external: int

    @property
    def num_local(self) -> int:
        """Prompt tokens that came from the engine's own prefix cache."""
        return self.reply.num_cached_tokens - self.num_external

    @property
    def num_cacheable(self) -> int:
        """The most prompt tokens that can come from a cache: full blocks, and one token is left."""
        return (self.reply.num_prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def hold(
    url: str,
    *,
    system: str | None = None,
    answers: Sequence[str] | None = None,
    turns: int = len(QUESTIONS),
    before_turn: Callable[[], object] = lambda: None,
) -> list[Turn]:
    """Hold the dialogue with one engine.

    Args:
        url: Of the engine.
        system: Another system prompt than the usual one.
        answers: What the assistant is held to have said, so that the prompts are those of another
            run; its own answers if None.
        turns: How many questions to ask.
        before_turn: Called before each of them.
    """
    messages = [{"role": "system", "content": system or system_prompt()}]
    found = []
    for number, question in enumerate(QUESTIONS[:turns]):
        before_turn()
        messages.append({"role": "user", "content": question})
        before = apiclient.external_tokens(url)
        reply = apiclient.chat(url, messages, max_tokens=ANSWER_TOKENS)
        found.append(Turn(reply=reply, num_external=apiclient.external_tokens(url) - before))
        said = reply.text if answers is None else answers[number]
        messages.append({"role": "assistant", "content": said})
    return found


def largest_gap(turn: Turn, reference: Turn) -> float:
    """Return the largest difference of two answers' logprobs; infinite if the tokens differ."""
    if turn.reply.tokens != reference.reply.tokens:
        return float("inf")
    pairs = zip(turn.reply.logprobs, reference.reply.logprobs, strict=True)
    return max((abs(one - two) for one, two in pairs), default=float("inf"))


def is_same(turn: Turn, reference: Turn) -> bool:
    """Say whether text and logprobs are equal."""
    return turn.reply.text == reference.reply.text and largest_gap(turn, reference) <= TOLERANCE
