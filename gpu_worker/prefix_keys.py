"""Names for prefixes of prompts, block by block: equal exactly for equal tokens under the same salt.

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
        self._block_size = block_size

    def of(self, salt: str, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """16 bytes for each full block; none without a salt: then nothing may be shared."""
        if not salt:
            return ()
        secret = blake2b(salt.encode(), key=self._secret, digest_size=32).digest()
        body = array("I", token_ids).tobytes()
        size = self._block_size * array("I").itemsize
        keys: list[bytes] = []
        key = b""
        for end in range(size, len(body) + 1, size):
            key = blake2b(key + body[end - size : end], key=secret, digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return tuple(keys)
