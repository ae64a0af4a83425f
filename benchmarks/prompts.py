"""Seeded prompts."""

import random

#: Ids below are the tokenizer's special tokens.
FIRST_TOKEN = 10


def random_prompt(seed: int, num_tokens: int, vocabulary: int) -> list[int]:
    """Return the random prompt of a seed: ``num_tokens`` token ids below ``vocabulary``."""
    return random.Random(seed).choices(range(FIRST_TOKEN, vocabulary), k=num_tokens)
