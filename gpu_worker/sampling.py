"""Next tokens from logits, batched over rows. Knows SamplingParameters; refuses to know models, plans and text.

Random numbers come from no state at all: the noise of a row is a function of (seed, position, token id), so that a
request draws the same tokens whatever batch, chunk, pause or machine it goes through.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wire.messages import SamplingParameters, TokenLogprob

GREEDY = SamplingParameters(temperature=0.0)
FIRST_CANDIDATES, MORE_CANDIDATES = 256, 4_096  # sorted for top_p; a whole row only when these hold too little of it
NOISE_SIZE, NOISE_PIECE = 1 << 22, 1 << 18
LONG_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row needs for its next token. ``stream`` names the random stream: one per request, or per given seed."""

    parameters: SamplingParameters
    stream: int  # 64 bits
    output_ids: Sequence[int]

    @property
    def position(self) -> int:
        return len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Columns aligned with the draws. ``margins``: top logit less the second, empty unless asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    margins: list[float]


def stream_of(parameters: SamplingParameters, request_id: str) -> int:
    """The seed's stream, or, without a seed, one that belongs to the request (and survives its re-dispatch)."""
    name = f"request {request_id}" if parameters.seed is None else f"seed {parameters.seed}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


class Sampler:
    """Always: the result of a row depends on its own logits and draw alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._noise = noise_table(max(NOISE_SIZE, 64 * vocab_size))

    def sample(self, logits: Tensor, draws: Sequence[Draw], *, with_margins: bool = False) -> Sampled:
        """``logits`` [R, vocabulary], finite; overwritten."""
        margins: list[float] = []
        if with_margins:
            best = logits.topk(2, dim=1).values
            margins = (best[:, 0] - best[:, 1]).tolist()
        logprob_of = [_logprobs(row, draw.parameters) for row, draw in zip(logits, draws, strict=True)]
        for row, draw in zip(logits, draws, strict=True):
            _bend(row, draw)
            if draw.parameters.temperature > 0:
                row.div_(draw.parameters.temperature)
        cut_to_candidates(logits, [draw.parameters for draw in draws])
        for row, draw in zip(logits, draws, strict=True):
            if draw.parameters.temperature > 0:
                row.add_(self._noise_of(draw))  # Gumbel's trick: the largest of log p + noise is a draw from p
        token_ids = logits.max(dim=1).indices.tolist()  # several times as fast as argmax
        logprobs = [of and of(token_id) for of, token_id in zip(logprob_of, token_ids, strict=True)]
        return Sampled(token_ids, logprobs, margins)

    def _noise_of(self, draw: Draw) -> Tensor:
        """[vocabulary] of Gumbel noise: a window of the table that stream and position choose."""
        start = _splitmix(draw.stream, draw.position) % (self._noise.numel() - self._vocab_size)
        return self._noise[start : start + self._vocab_size]


@functools.cache
def noise_table(size: int) -> Tensor:
    """Independent Gumbel variables, the same on every machine; hashing each token anew cost 20 times a window's price.

    Two windows that overlap give one token the noise of *another*, so draws stay independent to the eye of any text.
    """
    pieces = (range(first, min(first + NOISE_PIECE, size)) for first in range(0, size, NOISE_PIECE))
    return torch.cat([_gumbel(torch.arange(piece.start, piece.stop, dtype=torch.int32)) for piece in pieces])


def _gumbel(counters: Tensor) -> Tensor:
    bits = _mix(_mix(counters) + 1)
    # 24 bits, at the middle of each step: small exponentials, which decide, are the finest; 1.0 must not appear
    uniform = _shift(bits, 8).to(torch.float32).add_(0.5).mul_(2.0**-24).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def cut_to_candidates(scores: Tensor, parameters: Sequence[SamplingParameters]) -> None:
    """top_k, then top_p of what is left, and min_p: set all other scores of a row to -inf, in place.

    Each rule keeps a prefix of the row sorted downwards, so its smallest kept score is a threshold; ties with it stay.
    """
    rows = [index for index, p in enumerate(parameters) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
    if not rows:
        return
    chosen, vocab_size = [parameters[index] for index in rows], scores.shape[1]
    cut = scores[rows]
    first = FIRST_CANDIDATES if any(p.top_p < 1.0 for p in chosen) else 1
    for wanted in (first, MORE_CANDIDATES, vocab_size):
        num_sorted = min(max(wanted, *(p.top_k for p in chosen)), vocab_size)
        threshold = _threshold(cut, chosen, num_sorted)
        if threshold is not None:
            break
    else:
        raise AssertionError("a whole row holds all of its probability")
    scores[rows] = cut.masked_fill_(cut < threshold[:, None], -torch.inf)


def _threshold(scores: Tensor, parameters: Sequence[SamplingParameters], num_sorted: int) -> Tensor | None:
    """The smallest score that stays, per row [R]; None when ``num_sorted`` candidates hold too little for a top_p."""
    vocab_size = scores.shape[1]
    best = scores.topk(num_sorted, dim=1).values
    floor = best[:, 0] + torch.tensor([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in parameters])
    top_k = torch.tensor([min(p.top_k, vocab_size) for p in parameters])[:, None]
    top_p = torch.tensor([p.top_p for p in parameters])[:, None]
    smallest_of_k = torch.where(top_k > 0, best.gather(1, (top_k - 1).clamp_(min=0)), -torch.inf)
    kept = best.masked_fill((top_k > 0) & (torch.arange(num_sorted) >= top_k), -torch.inf)
    total = torch.where(top_k > 0, kept.logsumexp(dim=1, keepdim=True), scores.logsumexp(dim=1, keepdim=True))
    probabilities = (kept - total).exp_()
    stays = probabilities.cumsum(dim=1) - probabilities < top_p
    if num_sorted < vocab_size and bool((stays[:, -1:] & (top_p < 1.0) & (top_k == 0)).any()):
        return None
    last_of_p = (stays.sum(dim=1, keepdim=True) - 1).clamp_(min=0)
    smallest_of_p = torch.where(top_p < 1.0, kept.gather(1, last_of_p), -torch.inf)
    return torch.maximum(torch.maximum(smallest_of_k, smallest_of_p)[:, 0], floor)


def _bend(row: Tensor, draw: Draw) -> None:
    """Penalties on tokens already in the output, then the client's bias, in place (OpenAI's and CTRL's formulas)."""
    parameters = draw.parameters
    penalised = parameters.presence_penalty or parameters.frequency_penalty or parameters.repetition_penalty != 1.0
    if penalised and draw.output_ids:
        seen, counts = torch.unique(torch.tensor(draw.output_ids), return_counts=True)
        scores = row[seen]
        repetition = parameters.repetition_penalty
        scores = torch.where(scores > 0, scores / repetition, scores * repetition)
        row[seen] = scores - parameters.presence_penalty - parameters.frequency_penalty * counts
    if parameters.logit_bias:
        token_ids, biases = zip(*parameters.logit_bias, strict=True)
        row[list(token_ids)] += torch.tensor(biases)


def _logprobs(row: Tensor, parameters: SamplingParameters) -> Callable[[int], TokenLogprob] | None:
    """Of the model's own distribution, before penalties, bias and temperature; None where not asked for."""
    if parameters.num_top_logprobs is None:
        return None
    logprobs = row.log_softmax(dim=0)
    best = logprobs.topk(parameters.num_top_logprobs)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return lambda token_id: TokenLogprob(token_id=token_id, logprob=float(logprobs[token_id]), top=top)


def _splitmix(stream: int, position: int) -> int:
    """64 bits out of a stream and a position: splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = (stream + (position + 1) * 0x9E37_79B9_7F4A_7C15) & LONG_WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58_476D_1CE4_E5B9) & LONG_WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D0_49BB_1331_11EB) & LONG_WORD
    return mixed ^ (mixed >> 31)


def _mix(words: Tensor) -> Tensor:
    """lowbias32, a bijection of 32-bit words with little bias (Wellons, nullprogram.com/blog/2018/07/31)."""
    words = words ^ _shift(words, 16)
    words *= 0x7FEB_352D
    words ^= _shift(words, 15)
    words *= 0x846C_A68B - (1 << 32)  # as a signed word
    words ^= _shift(words, 16)
    return words


def _shift(words: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)
