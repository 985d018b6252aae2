"""Keys as text: shape, checksum, digest."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants import api_keys


def test_a_made_key_parses_back_to_its_own_parts() -> None:
    key = api_keys.make("demo")
    parsed = api_keys.parse(key.text)
    assert (parsed.env, parsed.public_id) == ("demo", key.public_id)
    assert api_keys.digest(parsed.secret) == key.secret_sha256
    assert key.text.endswith(key.last4)


def test_a_key_has_the_documented_shape() -> None:
    key = api_keys.make("live")
    head, env, public_id, rest = key.text.split("_")
    assert (head, env, len(public_id), len(rest)) == ("sk", "live", 12, 43 + 6)


def test_only_the_secret_part_is_digested_with_plain_sha256() -> None:  # P46
    key = api_keys.make("live")
    secret = key.text.split("_")[3][:43]
    assert key.secret_sha256 == hashlib.sha256(secret.encode()).hexdigest()


def test_two_keys_never_share_a_public_id_or_a_secret() -> None:
    keys = [api_keys.make("live") for _ in range(200)]
    assert len({key.public_id for key in keys}) == len({key.secret_sha256 for key in keys}) == 200


def test_a_checksum_is_stable_across_releases() -> None:
    text = "sk_live_" + "0" * 12 + "_" + "A" * 43
    assert api_keys.parse(text + "4SD6PA").public_id == "0" * 12


@given(position=st.integers(min_value=0, max_value=69), letter=st.sampled_from(api_keys.ALPHABET))
def test_any_single_mistyped_letter_is_refused(position: int, letter: str) -> None:
    text = api_keys.make("demo").text
    if text[position] == letter:
        return
    with pytest.raises(api_keys.MalformedKey):
        api_keys.parse(text[:position] + letter + text[position + 1 :])


@pytest.mark.parametrize(
    "text",
    ["", "sk_", "sk_demo_x_y", "Bearer sk_demo", "sk_demo_" + "é" * 12 + "_" + "a" * 49, "sk_DEMO_" + "a" * 62],
)
def test_text_of_another_shape_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(api_keys.MalformedKey) as refusal:
        api_keys.parse(text)
    assert len(text) < 8 or text not in str(refusal.value)


def test_a_key_with_a_line_break_behind_it_is_refused() -> None:
    with pytest.raises(api_keys.MalformedKey):
        api_keys.parse(api_keys.make("demo").text + "\n")


@pytest.mark.parametrize("env", ["", "Live", "a_b", "x" * 17, "démo"])
def test_an_environment_word_is_small_letters_only(env: str) -> None:
    with pytest.raises(ValueError, match="small letters"):
        api_keys.make(env)
