"""Next tokens from logits, batched over rows. Knows how a row is to be drawn; refuses to know models, plans and text.

The order: penalties, bias, stops that are too early, grammar, temperature, top_k, top_p, min_p, the draw. The noise of
a row is a function of (stream, position, token id), so that a request draws the same tokens whatever batch, chunk,
pause or machine it goes through.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from gpu_worker.device.noise import GumbelNoise
from gpu_worker.executor import DrawRules
from wire.messages import SamplingParameters, TokenLogprob

GREEDY = DrawRules(SamplingParameters(temperature=0.0))
GREEDY_BELOW = 1e-5  # a colder row would leave the range of float32
FIRST_CANDIDATES, MORE_CANDIDATES = 256, 4_096  # sorted for top_p; a whole row only when these hold too little of it
NOT_DRAWN = -1


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row needs for its next token. ``stream`` names the random stream: one per request, or per given seed."""

    rules: DrawRules
    stream: int  # 64 bits
    output_ids: Sequence[int]
    allowed: bytes | None = None  # what the grammar lets follow, a bit per token id; None: everything

    @property
    def position(self) -> int:
        return len(self.output_ids)

    @property
    def is_greedy(self) -> bool:
        return self.rules.parameters.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Sampled:
    """Columns aligned with the draws. ``token_ids``: NOT_DRAWN where a row's numbers are not finite.

    ``margins``: top logit less the second, of the model's own logits; empty unless asked for.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    margins: list[float]


def stream_of(parameters: SamplingParameters, request_id: str) -> int:
    """The seed's stream, or, without a seed, one that belongs to the request (and survives its re-dispatch)."""
    name = f"request {request_id}" if parameters.seed is None else f"seed {parameters.seed}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


class Sampler:
    """Always: the result of a row depends on its own logits and draw alone."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._noise = GumbelNoise(vocab_size, device)

    def sample(self, logits: Tensor, draws: Sequence[Draw], *, with_margins: bool = False) -> Sampled:
        """``logits`` [R, vocabulary], overwritten. Raises IndexError for a bias on a token that does not exist."""
        logits = logits.to(torch.float32)  # half precision would round the noise and add probabilities up wrongly
        margins = _margins(logits) if with_margins else []
        asked = _Asked(logits, [draw.rules.parameters.num_top_logprobs for draw in draws])
        for row, draw in zip(logits, draws, strict=True):
            _bend(row, draw)
        drawn = [index for index, draw in enumerate(draws) if not draw.is_greedy]
        if drawn:
            _cool(logits, draws)
            cut_to_candidates(logits, [GREEDY.parameters if d.is_greedy else d.rules.parameters for d in draws])
        for index in drawn:  # Gumbel's trick: the largest of log p + noise is a draw from p
            logits[index] += self._noise.window(draws[index].stream, draws[index].position)
        best = logits.max(dim=1)  # several times as fast as argmax
        token_ids = best.indices.masked_fill(~best.values.isfinite(), NOT_DRAWN).tolist()
        return Sampled(token_ids, asked.logprobs(token_ids), margins)


class _Asked:
    """Rows that want logprobs, as the model gave them. Always: a copy, so that bending the logits changes nothing."""

    def __init__(self, logits: Tensor, num_top: Sequence[int | None]) -> None:
        self._num_top = num_top
        self._rows = [index for index, count in enumerate(num_top) if count is not None]
        if self._rows:
            scores = logits[self._rows]
            self._logprobs = scores.sub_(scores.logsumexp(dim=1, keepdim=True))

    def logprobs(self, token_ids: Sequence[int]) -> list[TokenLogprob | None]:
        """Aligned with all rows: None where not asked for, or nothing was drawn."""
        found: list[TokenLogprob | None] = [None] * len(self._num_top)
        if not self._rows:
            return found
        most = min(max(self._num_top[index] or 0 for index in self._rows), self._logprobs.shape[1])
        best = self._logprobs.topk(most, dim=1)
        chosen = torch.tensor([max(0, token_ids[index]) for index in self._rows], device=best.values.device)
        own = self._logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for index, logprob, (top_ids, top_values) in zip(self._rows, own, tops, strict=True):
            if token_ids[index] != NOT_DRAWN:
                top = tuple(zip(top_ids, top_values, strict=True))[: self._num_top[index]]
                found[index] = TokenLogprob(token_id=token_ids[index], logprob=logprob, top=top)
        return found


def _margins(logits: Tensor) -> list[float]:
    best = logits.topk(2, dim=1).values
    margins: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return margins


def _cool(logits: Tensor, draws: Sequence[Draw]) -> None:
    temperatures = [1.0 if draw.is_greedy else draw.rules.parameters.temperature for draw in draws]
    if any(temperature != 1.0 for temperature in temperatures):
        logits.div_(torch.tensor(temperatures, device=logits.device)[:, None])


def cut_to_candidates(scores: Tensor, parameters: Sequence[SamplingParameters]) -> None:
    """top_k, then top_p of what is left, and min_p: set all other scores of a row to -inf, in place.

    Each rule keeps a prefix of the row sorted downwards, so its smallest kept score is a threshold; ties with it stay.
    """
    rows = [index for index, p in enumerate(parameters) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
    for first in (FIRST_CANDIDATES, MORE_CANDIDATES, scores.shape[1]):  # a flat row needs more for its top_p
        if not rows:
            return
        part = scores if len(rows) == scores.shape[0] else scores[rows]
        thresholds, is_enough = _thresholds(part, [parameters[index] for index in rows], first)
        for index, threshold, enough in zip(rows, thresholds, is_enough, strict=True):
            if enough:
                scores[index].masked_fill_(scores[index] < threshold, -torch.inf)
        rows = [index for index, enough in zip(rows, is_enough, strict=True) if not enough]


def _thresholds(scores: Tensor, parameters: Sequence[SamplingParameters], first: int) -> tuple[Tensor, list[bool]]:
    """The smallest score that stays, per row [R], and whether ``first`` candidates were enough to find it."""
    device, vocab_size = scores.device, scores.shape[1]
    nucleus = any(p.top_p < 1.0 for p in parameters)
    num_sorted = min(max(first if nucleus else 1, *(p.top_k for p in parameters)), vocab_size)
    best = scores.topk(num_sorted, dim=1).values if num_sorted > 1 else scores.max(dim=1, keepdim=True).values
    log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in parameters]
    threshold = best[:, 0] + torch.tensor(log_min_p, device=device)
    top_k = torch.tensor([min(p.top_k, vocab_size) for p in parameters], device=device)[:, None]
    smallest_of_k = torch.where(top_k > 0, best.gather(1, (top_k - 1).clamp_(min=0)), -torch.inf)
    threshold = torch.maximum(threshold, smallest_of_k[:, 0])
    if not nucleus:
        return threshold, [True] * len(parameters)
    top_p = torch.tensor([p.top_p for p in parameters], device=device)[:, None]
    kept = best.masked_fill((top_k > 0) & (torch.arange(num_sorted, device=device) >= top_k), -torch.inf)
    total = torch.where(top_k > 0, kept.logsumexp(dim=1, keepdim=True), scores.logsumexp(dim=1, keepdim=True))
    probabilities = (kept - total).exp_()
    stays = probabilities.cumsum(dim=1) - probabilities < top_p
    last_of_p = (stays.sum(dim=1, keepdim=True) - 1).clamp_(min=0)
    smallest_of_p = torch.where(top_p < 1.0, kept.gather(1, last_of_p), -torch.inf)
    lacks_some = stays[:, -1:] & (top_p < 1.0) & (top_k == 0) if num_sorted < vocab_size else torch.zeros_like(top_k)
    return torch.maximum(threshold, smallest_of_p[:, 0]), (lacks_some[:, 0] == 0).tolist()


def _bend(row: Tensor, draw: Draw) -> None:
    """Everything that a row's own history and rules change, in place; most rows have none."""
    rules, parameters = draw.rules, draw.rules.parameters
    if parameters.repetition_penalty != 1.0:
        _penalise_repetition(row, [*rules.prompt_token_ids, *draw.output_ids], parameters.repetition_penalty)
    if (parameters.presence_penalty or parameters.frequency_penalty) and draw.output_ids:
        seen, counts = torch.unique(torch.tensor(draw.output_ids, device=row.device), return_counts=True)
        row[seen] -= parameters.presence_penalty + parameters.frequency_penalty * counts
    if parameters.logit_bias:
        token_ids, biases = zip(*parameters.logit_bias, strict=True)
        if not 0 <= min(token_ids) <= max(token_ids) < row.shape[0]:  # on a GPU a wrong index ends the process
            raise IndexError(f"logit_bias names token {max(token_ids)} of {row.shape[0]}")
        row[list(token_ids)] += torch.tensor(biases, device=row.device)
    if draw.allowed is not None:  # then the grammar alone says when a text may end
        row.masked_fill_(_forbidden(draw.allowed, row.shape[0]).to(row.device), -torch.inf)
    elif draw.position < rules.min_tokens and rules.stop_token_ids:
        row[[token_id for token_id in rules.stop_token_ids if token_id < row.shape[0]]] = -torch.inf


def _penalise_repetition(row: Tensor, token_ids: Sequence[int], penalty: float) -> None:
    """Keskar and others 2019 (CTRL): a score above 0 is divided, one below is multiplied, each token once."""
    seen = torch.unique(torch.tensor(token_ids, dtype=torch.int64, device=row.device))
    scores = row[seen]
    row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)


def _forbidden(allowed: bytes, size: int) -> Tensor:
    """[size] of bool from a bit per token; a token beyond the bits is forbidden."""
    bits = numpy.unpackbits(numpy.frombuffer(allowed, numpy.uint8), count=size, bitorder="little")
    return torch.from_numpy(bits == 0)
