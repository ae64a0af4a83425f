from kvcommon.memory.proof import PROOF_BYTES, answer, question


def test_question_and_answer_differ_and_depend_on_the_nonce() -> None:
    texts = {question(1), answer(1), question(2), answer(2)}
    assert len(texts) == 4
    assert {len(text) for text in texts} == {PROOF_BYTES}
    assert question(1) == question(1)
