"""Stop strings, matched on token bytes as they come. Knows bytes; refuses to know tokenizers and text encodings.

The automaton is Aho and Corasick's (1975): one state per prefix of any stop string, its depth being the number of
bytes that may still turn out to belong to one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """All stop strings of one request, compiled. Always: immutable after construction, shared by siblings."""

    def __init__(self, stop_strings: Sequence[bytes]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self.depth = [0]
        self._fail = [0]
        self.longest_match = [0]  # length of the longest stop string that ends in this state; 0 = none
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()

    def _insert(self, stop_string: bytes) -> None:
        state = 0
        for byte in stop_string:
            if byte not in self._next[state]:
                self._next[state][byte] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self._fail.append(0)
                self.longest_match.append(0)
            state = self._next[state][byte]
        self.longest_match[state] = len(stop_string)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, child in self._next[state].items():
                self._fail[child] = self.advance(self._fail[state], byte)
                self.longest_match[child] = self.longest_match[child] or self.longest_match[self._fail[child]]
                waiting.append(child)

    def advance(self, state: int, byte: int) -> int:
        while state and byte not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(byte, 0)


class StopMatcher:
    """One growing text. Always: tokens before ``num_decided`` cannot touch any stop string that may still complete.

    ``visible_bytes`` is None until a stop string has completed; then it is where that string begins. The first to
    complete wins, the longest of those that complete together.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._num_bytes = 0
        self._undecided: deque[int] = deque()  # ends, in bytes, of the tokens held back
        self.num_decided = 0
        self.visible_bytes: int | None = None

    def push(self, token_bytes: bytes, *, may_stop: bool = True) -> bool:
        """Take the next token's bytes. True when a stop string has completed. ``may_stop`` False: matches do not
        count.
        """
        automaton = self._automaton
        for byte in token_bytes:
            self._state = automaton.advance(self._state, byte)
            self._num_bytes += 1
            matched = automaton.longest_match[self._state]
            if matched and may_stop and self.visible_bytes is None:
                self.visible_bytes = self._num_bytes - matched
        if self.visible_bytes is not None:
            return True
        self._undecided.append(self._num_bytes)
        decided_bytes = self._num_bytes - automaton.depth[self._state]
        while self._undecided and self._undecided[0] <= decided_bytes:
            self._undecided.popleft()
            self.num_decided += 1
        return False
