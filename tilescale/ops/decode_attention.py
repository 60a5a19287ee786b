# SPDX-License-Identifier: MIT
"""Attention of new tokens to cached keys and to themselves, as tasks of a decode step.

A task takes some keys of a group of heads of a sequence; what it finds is combined with that of the other keys later.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.decode_sizes import COLUMNS, SPAN, LayerSizes


@T.macro
def load(
    cache: Any, table: Any, at: Any, tile: Any, sizes: LayerSizes, layer: Any, group: Any, row: Any, key: Any
) -> None:  # fmt: skip
    """Fill a tile with a sequence's keys from `key` on, of which one is cached at least; later ones do not count."""
    if sizes.page:
        for part in T.unroll(SPAN // min(sizes.page, SPAN)):
            load_of_page(cache, table, at, tile, sizes, layer, group, row, key, part * sizes.page)
    else:
        T.copy(cache[layer, row, group, key : key + SPAN, :], tile)


@T.macro
def load_of_page(
    cache: Any, table: Any, at: Any, tile: Any, sizes: LayerSizes,
    layer: Any, group: Any, row: Any, key: Any, part: Any,
) -> None:  # fmt: skip
    """Fill the rows of a tile that are in one page, which is that of a cached key."""
    each = min(sizes.page, SPAN)
    page = table[row, T.max(T.min(key + part, at[row] - 1), 0) // sizes.page]
    begin = (key + part) % sizes.page
    T.copy(cache[layer, page, begin : begin + each, group, :], tile[part : part + each, :])


@T.macro
def store(
    cache: Any, table: Any, key: Any, value: Any, number: int, sizes: LayerSizes, layer: Any, group: Any, row: Any
) -> None:  # fmt: skip
    """Cache a row of `value` for the new token; a full sequence has no page for it."""
    if sizes.page:
        page = table[row, key // sizes.page]
        for j in T.Parallel(sizes.width):
            if key < sizes.keys:
                cache[layer, page, key % sizes.page, group, j] = value[number, j]
    else:
        for j in T.Parallel(sizes.width):
            cache[layer, row, group, key, j] = value[number, j]


@T.macro
def factor(squares: Any, scale: Any, sizes: LayerSizes, sequence: Any) -> None:
    """The factors of the norms of some rows; `sequence` is that of a row."""
    rows = int(scale.shape[0])
    T.clear(scale)
    for column in T.unroll(sizes.hidden // COLUMNS):
        for i in T.Parallel(rows):
            scale[i] += squares[column, sequence(i)]
    for i in T.Parallel(rows):
        scale[i] = T.rsqrt(scale[i] / sizes.hidden + sizes.epsilon)


@T.macro
def normalize(given: Any, norms: Any, sizes: LayerSizes) -> None:
    """Queries and the key behind them, each normalized; the value stays."""
    each, width = sizes.heads // sizes.groups, sizes.width
    fresh = T.alloc((each + 2, width), "float32", level="l0")
    square = T.alloc((each + 2, width), "float32", level="l0")
    total = T.alloc((each + 2,), "float32", level="l0")
    T.copy(given, fresh)
    for i, j in T.Parallel(each + 2, width):
        square[i, j] = fresh[i, j] * fresh[i, j]
    T.reduce_sum(square, total, dim=1)
    for i in T.Parallel(each + 2):
        total[i] = T.rsqrt(total[i] / width + sizes.epsilon)
    for i, j in T.Parallel(each + 2, width):
        weight = T.if_then_else(i < each, norms[0, j], norms[1, j])
        fresh[i, j] *= T.if_then_else(i <= each, total[i] * weight, 1)
    T.copy(fresh, given)


@T.macro
def projected(QKV: Any, scale: Any, given: Any, first: int, heads: int, row: Any, head: Any) -> None:
    """Some heads of a sequence, the sums of their parts, as rows of `given`; `head` is of one of them its number."""
    width = int(given.shape[1])
    fresh = T.alloc((heads, width), "float32", level="l0")
    T.clear(fresh)
    for part in T.unroll(int(QKV.shape[0])):
        for i, j in T.Parallel(heads, width):
            fresh[i, j] += QKV[part, row, head(i) * width + j]
    for i, j in T.Parallel(heads, width):
        given[first + i, j] = fresh[i, j] * scale[0]


@T.macro
def rotate(
    QKV: Any, squares: Any, heads: Any, angles: Any, q: Any, given: Any, rotated: Any, sizes: LayerSizes,
    layer: Any, group: Any, row: Any,
) -> None:  # fmt: skip
    """A group's queries, key and value as projected, the first two also rotated; the queries once more as a tile.

    What depends on no other task is loaded first.
    """
    s, half, each = sizes, sizes.width // 2, sizes.heads // sizes.groups
    scale = T.alloc((1,), "float32", level="l0")
    rotation = T.alloc((2, half), "float32", level="l1")
    T.copy(angles[:, row, :], rotation)
    if s.head_norms:
        norms = T.alloc((2, s.width), "float32", level="l1")
        T.copy(heads[layer, :, :], norms)
    for i, j in T.Parallel(s.queries, s.width):
        q[i, j] = 0
    factor(squares, scale, s, lambda i: row)
    projected(QKV, scale, given, 0, each, row, lambda i: group * each + i)
    projected(QKV, scale, given, each, 2, row, lambda i: s.heads + i * s.groups + group)
    if s.head_norms:
        normalize(given, norms, s)
    for i, j in T.Parallel(each + 1, half):
        rotated[i, j] = given[i, j] * rotation[0, j] - given[i, half + j] * rotation[1, j]
        rotated[i, half + j] = given[i, half + j] * rotation[0, j] + given[i, j] * rotation[1, j]
    for i, j in T.Parallel(each, s.width):
        q[i, j] = rotated[i, j]


@T.macro
def attend_to_itself(
    S: Any, L: Any, given: Any, rotated: Any, sizes: LayerSizes, group: Any, row: Any
) -> None:  # fmt: skip
    """The part of a new token in its attention."""
    s, each = sizes, sizes.heads // sizes.groups
    product = T.alloc((each, s.width), "float32", level="l0")
    own = T.alloc((each,), "float32", level="l0")
    for i, j in T.Parallel(each, s.width):
        product[i, j] = rotated[i, j] * rotated[each, j]
        S[s.spans, row, group * each + i, j] = given[each + 1, j]
    T.reduce_sum(product, own, dim=1)
    for i in T.Parallel(each):
        L[s.spans, row, group * each + i, 0] = own[i] * s.scale
        L[s.spans, row, group * each + i, 1] = 1


def early_tiles(sizes: LayerSizes, k: Any, v: Any) -> tuple[Any, Any]:
    """Tiles for a task's only keys and values, loaded before the task waits: in registers, since a store on chip waits
    for the load. Tiles of pages have several loads, so they are on chip.
    """
    if sizes.tiles > 1 or sizes.page:
        return k, v
    return tuple(T.alloc((SPAN, sizes.width), "bfloat16", level="l0") for _ in range(2))


def has_keys(sizes: LayerSizes, span: Any) -> Any:
    """Whether a task of attention takes cached keys."""
    return sizes.attends == sizes.spans or span < sizes.spans


def has_itself(sizes: LayerSizes, span: Any, length: Any) -> Any:
    """Whether it takes the new token: one that takes nothing else, or that whose keys the token joins."""
    return is_behind(sizes, span, length) if sizes.attends == sizes.spans else span == sizes.spans


def is_behind(sizes: LayerSizes, span: Any, length: Any) -> Any:
    """Whether the new token's place in the cache is among the keys that a task loads: no other task does."""
    return length // (sizes.tiles * SPAN) == span


@T.macro
def attend(
    QKV: Any, squares: Any, heads: Any, angles: Any, at: Any, table: Any, K: Any, V: Any, S: Any, L: Any,
    sizes: LayerSizes, layer: Any, span: Any, group: Any, row: Any,
) -> None:  # fmt: skip
    """A group's attention over some of its cached keys: not normalized, with the maximum and the sum of each head.

    The task rotates the group's queries. One of them caches the new token's key and value where it has loaded tiles, so
    that no tile is changed before it is used; and one adds the token's attention to itself.
    """
    s, each, tiles, rows = sizes, sizes.heads // sizes.groups, sizes.tiles, sizes.queries
    q = T.alloc((rows, s.width), "bfloat16", level="l1")
    k = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    v = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    given = T.alloc((each + 2, s.width), "float32", level="l1")
    rotated = T.alloc((each + 1, s.width), "float32", level="l1")
    score = T.alloc((SPAN, rows), "float32", level="l0")
    weights = T.alloc((SPAN, rows), "float32", level="l0")
    weight = T.alloc((rows, SPAN), "bfloat16", level="l1")
    o = T.alloc((s.width, rows), "float32", level="l0")
    peak = T.alloc((rows,), "float32", level="l0")
    most = T.alloc((rows,), "float32", level="l0")
    before = T.alloc((rows,), "float32", level="l0")
    total = T.alloc((rows,), "float32", level="l0")
    first = span * tiles * SPAN
    length = T.alloc_var("int32")
    length = at[row]
    count = T.min(T.ceildiv(T.max(length - first, 0), SPAN), tiles)
    early_k, early_v = early_tiles(s, k, v)
    if tiles == 1 and count > 0:
        load(K, table, at, early_k, s, layer, group, row, first)
        load(V, table, at, early_v, s, layer, group, row, first)
    rotate(QKV, squares, heads, angles, q, given, rotated, s, layer, group, row)
    T.fill(most, -1e30)
    T.clear(weights)
    T.clear(o)
    for tile in T.Pipelined(tiles, num_stages=2) if tiles > 1 else T.serial(count):
        if tiles > 1:
            load(K, table, at, k, s, layer, group, row, first + tile * SPAN)
            load(V, table, at, v, s, layer, group, row, first + tile * SPAN)
        elif not s.page:
            T.copy(early_k, k)
            T.copy(early_v, v)
        T.clear(score)
        T.gemm(k, q, score, transpose_B=True)
        for i, j in T.Parallel(SPAN, rows):
            score[i, j] = T.if_then_else(first + tile * SPAN + i < length, score[i, j] * s.scale, -1e30)
        T.reduce_max(score, peak, dim=0)
        for j in T.Parallel(rows):
            before[j] = most[j]
            most[j] = T.max(most[j], peak[j])
        for i, j in T.Parallel(SPAN, rows):
            score[i, j] = T.exp2(score[i, j] - most[j])
            weights[i, j] = weights[i, j] * T.exp2(before[j] - most[j]) + score[i, j]
            weight[j, i] = score[i, j]
        for i, j in T.Parallel(s.width, rows):
            o[i, j] *= T.exp2(before[j] - most[j])
        T.gemm(v, weight, o, transpose_A=True, transpose_B=True)
    T.reduce_sum(weights, total, dim=0)
    if has_keys(s, span):
        for i, j in T.Parallel(s.width, rows):
            if j < each:
                S[span, row, group * each + T.min(j, each - 1), i] = o[i, j]
        for j in T.Parallel(rows):
            if j < each:
                L[span, row, group * each + T.min(j, each - 1), 0] = most[j]
                L[span, row, group * each + T.min(j, each - 1), 1] = total[j]
    if has_itself(s, span, length):
        attend_to_itself(S, L, given, rotated, s, group, row)
    if is_behind(s, span, length):
        store(K, table, length, rotated, each, s, layer, group, row)
        store(V, table, length, given, each + 1, s, layer, group, row)


@T.macro
def combine(S: Any, L: Any, sizes: LayerSizes, o: Any, place: Any, is_first: Any) -> None:
    """Some heads' attention over all keys, (heads, width); `place` is of a row the sequence and the head."""
    s, rows = sizes, int(o.shape[0])
    most = T.alloc((rows,), "float32", level="l0")
    total = T.alloc((rows,), "float32", level="l0")
    T.fill(most, -1e30)
    T.clear(total)
    T.clear(o)
    for span in T.unroll(s.spans + 1):
        for i in T.Parallel(rows):
            most[i] = T.max(most[i], L[span, place(i)[0], place(i)[1], 0])
    for span in T.unroll(s.spans + 1):
        for i in T.Parallel(rows):
            total[i] += T.exp2(L[span, place(i)[0], place(i)[1], 0] - most[i]) * L[span, place(i)[0], place(i)[1], 1]
        for i, j in T.Parallel(rows, s.width):
            o[i, j] += T.exp2(L[span, place(i)[0], place(i)[1], 0] - most[i]) * S[span, place(i)[0], place(i)[1], j]
    for i, j in T.Parallel(rows, s.width):
        o[i, j] = o[i, j] / total[i]
