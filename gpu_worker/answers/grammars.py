"""Grammars as masks over one vocabulary, by llguidance. Knows the bytes of tokens; refuses to know requests and logits.

A mask is quick, within bounds that llguidance keeps itself; compiling may take a second, and
happens on a thread of its own before a request is handed to the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from gpu_worker.executor import Constraint, ConstraintError
from wire.grammars import GrammarError, source_of
from wire.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# Of llguidance's parser, so that an object may have wire.grammars.MAX_PROPERTIES of any kind: a mask of it takes 80 ms.
MAX_ITEMS_IN_A_PLACE, MAX_ITEMS_A_MASK = 4_000, 1_000_000


class GrammarCompiler:
    """Always: compiled constraints let a text end with any of the stop tokens, exactly where the grammar may end."""

    def __init__(self, token_bytes: Sequence[bytes], stop_token_ids: Sequence[int]) -> None:
        """At least one stop token. A token without bytes (control, padding) is never let through, but for the stops."""
        self.stop_token_ids = tuple(stop_token_ids)
        self._token_bytes = token_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-compiler")

    def compile(self, grammar: Grammar, count: int) -> Future[list[Constraint]]:
        """As many independent constraints. The result raises GrammarError with a sentence."""
        return self._thread.submit(self._compile, grammar, count)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar, count: int) -> list[Constraint]:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=MAX_ITEMS_IN_A_PLACE, step_max_items=MAX_ITEMS_A_MASK)
        matcher = LLMatcher(self._tokenizer, source_of(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # one that nothing can begin is told now
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip().partition("\n")[0])
        copies = [matcher, *(matcher.deep_copy() for _ in range(count - 1))]
        return [GrammarConstraint(copy, self.stop_token_ids) for copy in copies]

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as a trie, paid for by the first grammar."""
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens = _Tokens(self._token_bytes, self.stop_token_ids)
        tokens.trie = LLTokenizer(TokenizerWrapper(tokens))
        return tokens.trie


class _Tokens:
    """A vocabulary as llguidance asks for it."""

    trie: LLTokenizer | None = None

    def __init__(self, token_bytes: Sequence[bytes], stop_token_ids: Collection[int]) -> None:
        self.eos_token_id = min(stop_token_ids)
        self.bos_token_id = None
        self.special_token_ids = [
            token_id for token_id, text in enumerate(token_bytes) if not text or token_id in stop_token_ids
        ]
        self.tokens = [text or b"<|%d|>" % token_id for token_id, text in enumerate(token_bytes)]

    def __call__(self, text: bytes) -> list[int]:
        """Text to tokens, longest first: only asked for by grammars that force text upon the model."""
        return [] if self.trie is None else self.trie.greedy_tokenize(text.decode())


class GrammarConstraint:
    """See ``Constraint``. Always: the matcher has seen the first ``_num_seen`` tokens of the output."""

    def __init__(self, matcher: LLMatcher, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._end = min(stop_token_ids)
        self._num_seen = 0

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        new = list(output_ids[self._num_seen :])
        if new and not self._matcher.consume_tokens(new):
            raise ConstraintError(self._matcher.get_error())
        self._num_seen = len(output_ids)
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())
        if mask[self._end >> 3] >> (self._end & 7) & 1:
            for token_id in self._stop_token_ids:
                mask[token_id >> 3] |= 1 << (token_id & 7)
        return bytes(mask)
