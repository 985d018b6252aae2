"""What a key says, and what it keeps to itself."""

from __future__ import annotations

from gpu_worker.answers.prefix_keys import PrefixKeys

SECRET = bytes(range(32))


def test_a_key_covers_all_tokens_up_to_the_end_of_its_block() -> None:
    keys = PrefixKeys(SECRET, 4)
    whole = keys.of("aurora", range(11))
    assert len(whole) == 2
    assert all(len(key) == 16 for key in whole)
    assert keys.of("aurora", [*range(8), 99, 98, 97, 96])[:2] == whole
    other = keys.of("aurora", [7, *range(1, 11)])
    assert not set(other) & set(whole), "one token at the front changes all of them"
    assert keys.of("aurora", [0, 1, 2]) == ()


def test_keys_of_two_salts_or_two_boots_have_nothing_in_common_and_without_a_salt_there_are_none() -> None:
    prompt = list(range(64))
    mine = set(PrefixKeys(SECRET, 16).of("aurora", prompt))
    assert not mine & set(PrefixKeys(SECRET, 16).of("stranger", prompt))
    assert not mine & set(PrefixKeys(bytes(32), 16).of("aurora", prompt))
    assert PrefixKeys(SECRET, 16).of("", prompt) == ()
