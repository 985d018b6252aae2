"""Stop strings on bytes: where the text is cut, and what must be held back until that is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.answers.stop_strings import StopAutomaton, StopMatcher


def feed(stop_strings: list[bytes], tokens: list[bytes]) -> tuple[StopMatcher, int]:
    """The matcher and the number of tokens it took until it stopped (all, if it did not)."""
    matcher = StopMatcher(StopAutomaton(stop_strings))
    for count, token in enumerate(tokens, start=1):
        if matcher.push(token):
            return matcher, count
    return matcher, len(tokens)


def test_a_stop_string_across_three_tokens_cuts_where_it_begins() -> None:
    matcher, count = feed([b"STOP"], [b"hello S", b"TO", b"P and more", b"never"])
    assert count == 3
    assert matcher.visible_bytes == len(b"hello ")


def test_tokens_that_may_belong_to_a_stop_string_are_held_back() -> None:
    matcher, _ = feed([b"STOP"], [b"hello ", b"S", b"TO"])
    assert matcher.num_decided == 1


def test_held_tokens_are_let_go_when_the_stop_string_does_not_come() -> None:
    matcher, _ = feed([b"STOP"], [b"hello ", b"S", b"TO", b"RY"])
    assert matcher.num_decided == 4
    assert matcher.visible_bytes is None


def test_a_stop_string_that_begins_inside_a_failed_attempt_is_found() -> None:
    matcher, _ = feed([b"aab"], [b"a", b"a", b"a", b"b"])
    assert matcher.visible_bytes == 1


def test_half_a_character_in_a_token_does_not_hide_a_stop_string() -> None:
    snowman = "☃".encode()
    matcher, count = feed([snowman], [b"x" + snowman[:1], snowman[1:2], snowman[2:], b"y"])
    assert (count, matcher.visible_bytes) == (3, 1)


def test_a_match_before_the_minimum_length_does_not_count() -> None:
    matcher = StopMatcher(StopAutomaton([b"."]))
    assert not matcher.push(b".", may_stop=False)
    assert matcher.push(b"and.")
    assert matcher.visible_bytes == 4


@given(
    st.lists(st.binary(min_size=1, max_size=4).map(lambda raw: bytes(b % 3 for b in raw)), min_size=1, max_size=3),
    st.lists(st.binary(max_size=4).map(lambda raw: bytes(b % 3 for b in raw)), max_size=12),
)
def test_every_stop_string_is_found_at_its_first_completion(stop_strings: list[bytes], tokens: list[bytes]) -> None:
    matcher, count = feed(stop_strings, tokens)
    text = b"".join(tokens)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stop_strings if stop in text]
    if not ends:
        assert matcher.visible_bytes is None
        return
    end, negative_length = min(ends)
    assert matcher.visible_bytes == end + negative_length
    assert len(b"".join(tokens[: count - 1])) < end <= len(b"".join(tokens[:count]))


@given(
    st.lists(st.binary(min_size=1, max_size=4).map(lambda raw: bytes(b % 3 for b in raw)), min_size=1, max_size=3),
    st.lists(st.binary(max_size=4).map(lambda raw: bytes(b % 3 for b in raw)), max_size=12),
)
def test_no_token_is_let_go_that_a_stop_string_would_cut(stop_strings: list[bytes], tokens: list[bytes]) -> None:
    matcher = StopMatcher(StopAutomaton(stop_strings))
    let_go = 0
    for token in tokens:
        let_go = matcher.num_decided
        if matcher.push(token):
            break
    if matcher.visible_bytes is not None:
        assert len(b"".join(tokens[:let_go])) <= matcher.visible_bytes
