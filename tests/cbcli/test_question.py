"""Questions as they come from a terminal."""

from cbcli.question import read_question


def test_a_byte_that_is_no_text_is_no_lone_surrogate() -> None:
    assert read_question(" zebra \udcff\n") == "zebra \ufffd"
