"""Names for prefixes of what is said, block by block: equal exactly for equal tokens under the same salt.

Knows token ids and a secret of this worker; refuses to know what lies under a name. Without the secret a name says
nothing about its tokens, and nobody can make one that is somebody else's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_KEY_BYTES = 16


class PrefixKeys:
    """Keyed blake2b, chained: the key of a block covers all tokens up to its end."""

    def __init__(self, secret: bytes, block_size: int) -> None:
        """``secret``: 16 to 64 random bytes, of this boot alone."""
        self._secret = secret
        self.block_size = block_size

    def of(self, salt: str, token_ids: Sequence[int], after: bytes = b"") -> tuple[bytes, ...]:
        """16 bytes for each full block; none without a salt: then nothing may be shared.

        ``after``: the key of the block before the first.
        """
        if not salt:
            return ()
        secret = blake2b(salt.encode(), key=self._secret, digest_size=32).digest()
        body = array("I", token_ids).tobytes()
        size = self.block_size * array("I").itemsize
        keys: list[bytes] = []
        key = after
        for end in range(size, len(body) + 1, size):
            key = blake2b(key + body[end - size : end], key=secret, digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return tuple(keys)


class GrowingPrefix:
    """The keys of one sequence while it grows. Always: the first ``num_named`` blocks of it have theirs."""

    __slots__ = ("_keys", "_last", "_salt", "num_named")

    def __init__(self, keys: PrefixKeys, salt: str, prompt_keys: Sequence[bytes]) -> None:
        """``prompt_keys``: those of its beginning."""
        self._keys = keys
        self._salt = salt
        self._last = prompt_keys[-1] if prompt_keys else b""
        self.num_named = len(prompt_keys)

    def grow(self, prompt: Sequence[int], output: Sequence[int], num_computed: int) -> tuple[bytes, ...]:
        """Keys of the blocks that are full since the last call: the first ``num_computed`` tokens are in blocks."""
        size = self._keys.block_size
        start, end = self.num_named * size, num_computed // size * size
        middle = len(prompt)
        fresh = [*prompt[start:end], *output[max(0, start - middle) : max(0, end - middle)]]
        keys = self._keys.of(self._salt, fresh, self._last)
        if keys:
            self._last = keys[-1]
            self.num_named += len(keys)
        return keys
