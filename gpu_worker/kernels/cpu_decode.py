"""Decode attention for a CPU, compiled by numba: keys and values are read once, where they lie. Float32.

A block's tokens, then the next block's, with a running softmax (Milakov and Gimelshein 2018, in blocks as Dao and
others 2022). Per token of a row's context and layer 8 * K * D bytes are read and 4 * H * D operations done: of
arithmetic a core has enough, so what counts is that the next block is asked for while this one is computed. Letters as
in ``reference``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LINE = 16  # floats of a cache line: asking for one of them brings all
STEP = 4  # tokens that a loop takes at once, for which a query's numbers are loaded once; written out below
SMALLEST = numpy.float32(-87.0)  # below it exp has no normal float32; a weight there is 0
# Sums may be taken in another order, which vectors need. NaN and infinity stay what they are: a spoilt row shows.
FAST = {"reassoc", "contract", "nsz"}
SIGNATURE = types.void(
    types.Array(types.float32, 3, "A"),
    types.Array(types.float32, 3, "C"),
    *[types.intp] * 3,
    types.Array(types.int32, 2, "A"),
    types.Array(types.int32, 1, "A"),
    types.Array(types.float32, 3, "C"),
    *[types.intp] * 2,
)


def compiled() -> Callable[..., None]:
    """``_attend`` as machine code: compiled in some seconds, or read from where numba keeps what it has compiled."""
    options: dict[str, Any] = {"fastmath": FAST, "error_model": "numpy", "nogil": True}
    try:
        found = numba.njit(SIGNATURE, cache=True, **options)(_attend)
    except RuntimeError:  # neither the folder of this file nor the user's can be written
        found = numba.njit(SIGNATURE, **options)(_attend)
    return found  # type: ignore[no-any-return]


@intrinsic
def _ask_for(context, array, index):  # of numba's typing, where it must have this name or another unused one
    """``array[index]`` will be wanted: into the second level of the cache, the first holds what is used now."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address, word = builder.gep(data, [arguments[1]]), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [address, word(0), word(2), word(1)])  # to read, near but not nearest, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@numba.njit(inline="always", fastmath=FAST)
def _exp(x):
    """Of x <= 0, within 2e-7 of it: 2 ** n times a polynomial of the rest (Cephes; Moshier 1992).

    In a loop it becomes vectors, which a call of the C library does not.
    """
    bounded = SMALLEST if x < SMALLEST else x
    n = numpy.int32(bounded * numpy.float32(1.44269504) - numpy.float32(0.5))  # towards zero, so to the nearest
    whole = numpy.float32(n)
    rest = bounded - whole * numpy.float32(0.693359375) + whole * numpy.float32(2.12194440e-4)  # ln 2 in two parts
    found = numpy.float32(1.9875691500e-4)
    found = found * rest + numpy.float32(1.3981999507e-3)
    found = found * rest + numpy.float32(8.3334519073e-3)
    found = found * rest + numpy.float32(4.1665795894e-2)
    found = found * rest + numpy.float32(1.6666665459e-1)
    found = found * rest + numpy.float32(5.0000001201e-1)
    found = found * rest * rest + rest + numpy.float32(1.0)
    found *= numpy.int32((n + numpy.int32(127)) << numpy.int32(23)).view(numpy.float32)
    return numpy.float32(0.0) if x < SMALLEST else found


@numba.njit(inline="always")
def _ask_for_tokens(block, first, token, size):
    """STEP tokens' ``size`` floats. Beyond a block's end it is a wish too many, no read."""
    for start in range(first, first + STEP * token, token):
        for index in range(start, start + size, LINE):
            _ask_for(block, index)


@numba.njit(inline="always")
def _offsets(num_left, token):
    """Of the three tokens behind one, of which ``num_left`` are there; for what is not there the last one again.

    Unsigned, since an index that may be negative keeps a loop from becoming vectors.
    """
    return (
        numpy.uint64(min(1, num_left) * token),
        numpy.uint64(min(2, num_left) * token),
        numpy.uint64(min(3, num_left) * token),
    )


@numba.njit(inline="always", fastmath=FAST)
def _score(query, keys, offsets, found):
    """``found[:4]``: products of ``query`` [D] with ``keys[:D]`` and with those that begin at the three offsets."""
    second, third, fourth = offsets
    sum1 = sum2 = sum3 = sum4 = numpy.float32(0.0)
    for index in range(numpy.uint64(len(query))):
        number = query[index]
        sum1 += number * keys[index]
        sum2 += number * keys[index + second]
        sum3 += number * keys[index + third]
        sum4 += number * keys[index + fourth]
    found[0], found[1], found[2], found[3] = sum1, sum2, sum3, sum4


@numba.njit(inline="always", fastmath=FAST)
def _weigh(values, offsets, weights, total):
    """Adds to ``total`` [D] ``values[:D]`` and those at the three offsets, times ``weights[:4]``."""
    second, third, fourth = offsets
    weight1, weight2, weight3, weight4 = weights[0], weights[1], weights[2], weights[3]
    for index in range(numpy.uint64(len(total))):
        half = weight1 * values[index] + weight2 * values[index + second]
        total[index] += half + (weight3 * values[index + third] + weight4 * values[index + fourth])


@numba.njit(inline="always", fastmath=FAST)
def _to_weights(scores, top, weight_sum, total):
    """Scores [S] become exp(score - top) in place; what was weighed by a smaller top shrinks. Returns top and sum."""
    highest = top
    for score in scores:
        highest = score if score > highest else highest
    if highest > top:
        shrink = _exp(top - highest)
        weight_sum *= shrink
        for index in range(len(total)):
            total[index] *= shrink
    for slot in range(len(scores)):
        scores[slot] = _exp(scores[slot] - highest)
    for weight in scores:
        weight_sum += weight
    return highest, weight_sum


@numba.njit(inline="always", fastmath=FAST)
def _scale(numbers, factor, found):
    for index in range(len(found)):
        found[index] = numbers[index] * factor


@numba.njit(inline="always", fastmath=FAST)
def _attend_head(blocks, num_slots, first, token, queries, scores, tops, sums, mixed):
    """The first of two ``blocks``, its ``num_slots`` tokens, and a key/value head, whose keys begin at ``first``.

    ``queries`` [G, D], scaled; ``scores`` [G, S] for its own use. Goes on with ``tops`` and ``sums`` [G] and ``mixed``
    [G, D]: the largest scores so far, weights below them added up, and values times weights.
    """
    (group, head_dim), (block, following) = queries.shape, blocks
    for slot in range(0, num_slots, STEP):
        keys = first + slot * token
        _ask_for_tokens(following, keys, token, head_dim)
        offsets = _offsets(num_slots - 1 - slot, token)
        for member in range(group):
            _score(queries[member], block[keys:], offsets, scores[member, slot:])
    for member in range(group):
        scores[member, num_slots:] = -numpy.inf
        tops[member], sums[member] = _to_weights(scores[member], tops[member], sums[member], mixed[member])
    for slot in range(0, num_slots, STEP):
        values = first + token // 2 + slot * token
        _ask_for_tokens(following, values, token, head_dim)
        offsets = _offsets(num_slots - 1 - slot, token)
        for member in range(group):
            _weigh(block[values:], offsets, scores[member, slot:], mixed[member])


@numba.njit(inline="always", fastmath=FAST)
def _following(pool, layer, tables, row, place, num_blocks):
    """The block that is read after a row's ``place``: its next one, or the next row's first, or none but itself."""
    if place + 1 < num_blocks:
        return pool[tables[row, place + 1], layer]
    if row + 1 < len(tables):
        return pool[tables[row + 1, 0], layer]
    return pool[tables[row, place], layer]


def _attend(queries, pool, layer, block_size, num_kv_heads, tables, contexts, out, first, last):
    """Rows times key/value heads ``[first, last)`` of ``reference.attend_decode``.

    ``queries`` [R, H, D]; ``pool`` [blocks, L, S * 2 * K * D]; ``tables`` [R, blocks] and ``contexts`` [R] int32;
    ``out`` [R, H, D]. Of a block's slots behind the context none is read.
    """
    _, num_heads, head_dim = queries.shape
    group, token = num_heads // num_kv_heads, 2 * num_kv_heads * head_dim
    scale = numpy.float32(1.0 / numpy.sqrt(head_dim))
    scaled = numpy.empty((num_heads, head_dim), numpy.float32)
    scores = numpy.empty((group, (block_size + STEP - 1) // STEP * STEP), numpy.float32)
    tops, sums = numpy.empty(num_heads, numpy.float32), numpy.empty(num_heads, numpy.float32)
    for row in range(first // num_kv_heads, (last + num_kv_heads - 1) // num_kv_heads):
        kv_heads = range(max(0, first - row * num_kv_heads), min(num_kv_heads, last - row * num_kv_heads))
        for head in range(kv_heads.start * group, kv_heads.stop * group):
            tops[head], sums[head] = -numpy.inf, 0.0
            _scale(queries[row, head], scale, scaled[head])
            out[row, head] = 0.0
        context = contexts[row]
        num_blocks = (context + block_size - 1) // block_size
        for place in range(num_blocks):
            blocks = pool[tables[row, place], layer], _following(pool, layer, tables, row, place, num_blocks)
            num_slots = min(block_size, context - place * block_size)
            for kv_head in kv_heads:
                first_key, own = kv_head * head_dim, slice(kv_head * group, (kv_head + 1) * group)
                asked, mixed = scaled[own], out[row, own]
                _attend_head(blocks, num_slots, first_key, token, asked, scores, tops[own], sums[own], mixed)
        for head in range(kv_heads.start * group, kv_heads.stop * group if context else 0):
            _scale(out[row, head], numpy.float32(1.0) / sums[head], out[row, head])
