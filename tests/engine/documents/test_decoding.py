"""Encodings that nothing names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.documents.decoding import decode, is_binary
from tests.engine.documents.reading import document

TEXTS = {
    "latin": "The tide turns twice a day.\nIt is high at six.\n",
    "german": "Größe: 12\nÜber den Hafen\n" * 400,
    "cyrillic": "Прилив меняется дважды в день, в 6 часов.\n" * 3,
    "chinese": "夜班每晚把锅炉的读数写进蓝色的本子, 一共 12 本.\n一\n" * 3,
    "emoji": "high 🌊 low 🏖\n" * 1500,
}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_wide_encodings_without_a_mark(tmp_path: Path, text: str, encoding: str) -> None:
    assert document(tmp_path, "a.txt", text.replace("\n", "\r\n").encode(encoding)).text == text


@given(st.binary(min_size=4, max_size=64))
def test_zeros_among_other_bytes_are_no_wide_text(raw: bytes) -> None:
    assert is_binary(raw.replace(b"\0", b"\1") + b"\0\0\0\1\0\2")


def test_stray_bytes_in_utf8_are_read_and_told(tmp_path: Path) -> None:
    raw = "Größe – schön, 夜警\n".encode() + "café\n".encode("latin-1") + b"\x81\n"
    found = document(tmp_path, "a.txt", raw)
    assert found.text == "Größe – schön, 夜警\ncafé\n\ufffd\n"
    assert found.notes == ("2 bytes that are not UTF-8, read as Windows-1252",)


@pytest.mark.parametrize(
    "encoding", ["cp1252", "cp1251", "koi8_r", "shift_jis", "gb18030", "cp949", "big5", "cp1253"]
)
def test_old_encodings_are_not_taken_for_damaged_utf8(encoding: str) -> None:
    text = {
        "cp1252": "Größe, schön, über, naïve, “quoted” – façade",
        "shift_jis": "夜警は毎晩ボイラーの値を青い本に書く。カタカナ",
        "big5": "夜班每晚把鍋爐的讀數寫進藍色的本子。",
        "gb18030": "夜班每晚把锅炉的读数写进蓝色的本子。",
        "cp949": "안녕하세요 세계. 이것은 야간 근무 일지입니다.",
        "cp1253": "Καλημέρα, κόσμε. Αυτό είναι το ημερολόγιο.",
    }.get(encoding, "Привет, мир. Это журнал ночной смены.")
    decoded = decode((text * 20).encode(encoding))
    assert decoded is not None
    assert not decoded.notes


def test_wide_text_that_stops_inside_a_character(tmp_path: Path) -> None:
    found = document(tmp_path, "a.txt", "\ufeffThe tide turns 🌊".encode("utf-16-le")[:-2])
    assert found.text == "The tide turns \ufffd"
    assert found.notes


def test_one_very_long_line(tmp_path: Path) -> None:
    raw = b"caf\xe9 " * 400_000
    assert document(tmp_path, "a.txt", raw).text == "café " * 400_000


def test_a_stray_zero_makes_no_chinese_of_a_table() -> None:
    assert is_binary(b"a,b\n1,\0\n2,3\n")
