"""That the tests' own vLLM is what they take it for."""

from tests.vllm.worlds import make_text


def test_several_starts_in_one_process(start):
    text = make_text()
    answers = []
    for connector in (False, True, True):
        served = start("llama", connector=connector)
        assert (served.connector is not None) == connector
        answers.append(served.ask(text.prompt([0, 1]).token_ids, steps=3))
    assert len({answer.token_ids for answer in answers}) == 1
    served.ask(text.prompt([0, 1, 2]), ratio=0)
    served.ask(text.prompt([2, 1, 0]), ratio=0)
    assert len(served.runs) >= 1
