"""What tokens cost, in pure integers. Knows prices per million tokens; refuses to know who pays or where prices are
kept.

cost_micros = ceil( ((prompt - cached) * price_prompt + cached * price_cached + output * price_output) / 1_000_000 )

with every price in micro-units of money per million tokens. Rounded up once per operation, never per kind of token. The
settle script on the Bus computes the same formula; ``tests/billing`` compares the two.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

TOKENS_PER_PRICE = 1_000_000


class TokenKind(enum.StrEnum):
    """What a price is for. ``CACHED`` is the part of a prompt that was found in the prefix cache."""

    PROMPT = "prompt"
    CACHED = "cached"
    OUTPUT = "output"


class Terminal(enum.StrEnum):
    """How an operation ended; the words of the worker's Usage message."""

    COMPLETED = "completed"
    CANCELLED_CLIENT = "cancelled_client"
    CANCELLED_ADMIN = "cancelled_admin"
    SHED = "shed"
    FAILED_PLATFORM = "failed_platform"
    EXPIRED = "expired"


CHARGED_TERMINALS = frozenset({Terminal.COMPLETED, Terminal.CANCELLED_CLIENT, Terminal.CANCELLED_ADMIN})


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The worker's count of one operation. Always: 0 <= cached <= prompt and 0 <= output.

    ``prompt`` is what was computed (or found cached) of the prompt, ``output`` what was generated, over all choices.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.cached <= self.prompt and self.output >= 0):
            raise ValueError(f"token counts need 0 <= cached <= prompt and output >= 0: {self!r}")

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices of one model in one class, micro-units of money per million tokens. Always: none is negative."""

    prompt: int
    cached: int
    output: int

    def __post_init__(self) -> None:
        if min(self.prompt, self.cached, self.output) < 0:
            raise ValueError(f"a price is never negative: {self!r}")


FREE = TokenPrices(prompt=0, cached=0, output=0)


def scaled_cost(counts: TokenCounts, prices: TokenPrices) -> int:
    """Before rounding, in millionths of a micro-unit."""
    return (
        (counts.prompt - counts.cached) * prices.prompt + counts.cached * prices.cached + counts.output * prices.output
    )


def cost_micros(counts: TokenCounts, prices: TokenPrices) -> int:
    """The formula at the top of this page."""
    return -(-scaled_cost(counts, prices) // TOKENS_PER_PRICE)


def worst_case_micros(*, prompt_tokens: int, max_output_tokens: int, prices: TokenPrices) -> int:
    """What a reservation must hold: nothing cached at the dearer of the two prompt prices, every output token used."""
    dearest = TokenPrices(
        prompt=max(prices.prompt, prices.cached), cached=max(prices.prompt, prices.cached), output=prices.output
    )
    return cost_micros(TokenCounts(prompt=prompt_tokens, output=max_output_tokens), dearest)


def charge_micros(terminal: Terminal, counts: TokenCounts, prices: TokenPrices) -> int:
    """The charging table: an end that is the platform's doing costs nothing; any other costs what was computed.

    A cancel before prefill counts no tokens and so costs nothing; after prefill the prompt; after k tokens prompt + k.
    """
    return cost_micros(counts, prices) if terminal in CHARGED_TERMINALS else 0
