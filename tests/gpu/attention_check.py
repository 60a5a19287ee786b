# SPDX-License-Identifier: MIT
"""Attention over several GPUs: `torchrun --nproc-per-node 2 tests/gpu/attention_check.py`.

Arguments are as for `ops_check.py`, and so is how each operator runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import LATE_CYCLES, compare, main, poison, random, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, as_first, everyones  # noqa: E402
from tilescale import ops  # noqa: E402


def check_decode(only: slice) -> None:
    """Batch, query heads, key heads, keys of a rank, D, DV; values are the first columns of keys where D is more."""
    cases = [(2, 6, 2, 150, 64, 64), (4, 8 * SIZE, 8, 3000, 128, 128), (3, 128, 1, 5000, 576, 512)]
    for batch, heads, of_keys, keys, dim, value_dim in cases[only]:
        q, k = random(batch, heads, dim), random(batch, keys, of_keys, dim)
        q = as_first(q)
        v = k[..., :value_dim] if dim > value_dim else random(batch, keys, of_keys, value_dim)
        lengths = torch.randint(1, keys + 1, (batch,), device=DEVICE, dtype=torch.int32)
        counts = torch.arange(keys, device=DEVICE) < everyones(lengths)[:, :, None]
        keys_of, values = (everyones(x).transpose(0, 1).flatten(1, 2).float() for x in (k, v))
        scores = torch.einsum("bhgd,bkhd->bhgk", q.float().view(batch, of_keys, -1, dim), keys_of) * dim**-0.5
        scores.masked_fill_(~counts.transpose(0, 1).flatten(1)[:, None, None], -torch.inf)
        want = torch.einsum("bhgk,bkhd->bhgd", scores.softmax(-1), values).view(batch, heads, value_dim)
        for own in (False, True)[: 1 + (heads % SIZE == 0)]:

            def call(q=q, k=k, v=v, lengths=lengths, own=own, value_dim=value_dim) -> torch.Tensor:
                if q.shape[2] > value_dim:
                    return ops.mla_decode(q, k[:, :, 0], lengths, value_dim=value_dim, own_heads=own)
                return ops.flash_decode(q, k, v, lengths, own_heads=own)

            right = want.chunk(SIZE, 1)[RANK] if own else want
            title = f"decode {batch}x{heads}x{keys}x{dim}{', own heads' if own else ''}"
            runs(title, call, lambda c, right=right, title=title: compare(title, c, right))


def check_decode_of_pages(only: slice) -> None:
    """Page, batch, query heads, key heads, D, DV, type of the cache; pages of keys and values alternate if not latent.

    Pages that no sequence has are full of NaN, lengths go from 0, entries of the table after the last page are -1.
    """
    narrow = torch.float8_e4m3fn
    for page, batch, heads, of_keys, dim, value_dim, kind in [
        (16, 3, 8, 2, 128, 128, torch.bfloat16),
        (64, 256, 32, 8, 128, 128, torch.bfloat16),
        (256, 1, 8, 1, 64, 128, torch.bfloat16),
        (16, 2, 128, 1, 576, 512, torch.bfloat16),
        (64, 4, 128, 1, 576, 512, torch.bfloat16),
        (48, 5, 8, 2, 128, 128, narrow),
        (0, 2, 8, 2, 64, 64, narrow),
        (64, 33, 16, 1, 576, 512, narrow),
    ][only]:
        width, latent = 1200 // page + 1 if page else 1, dim > value_dim
        most = width * (page or 1200)
        lengths = torch.randint(0, most + 1, (batch,), device=DEVICE, dtype=torch.int32)
        lengths[0] = most - RANK
        count, q = batch * width + 1, as_first(random(batch, heads, dim))
        pages = random(count, 1 if latent or dim != value_dim else 2, page or most, of_keys, dim).to(kind)
        k, v = pages[:, 0], pages[:, -1]
        if dim != value_dim and not latent:
            v = random(count, page or most, of_keys, value_dim).to(kind)
        if not page:
            k, v = k[:batch], v[:batch]
        table = torch.randperm(count, device=DEVICE)[: batch * width].int().view(batch, width)
        needed = torch.arange(width, device=DEVICE) * (page or most) < lengths[:, None]
        order = table if page else torch.arange(batch, device=DEVICE)[:, None]
        counts = everyones(torch.arange(most, device=DEVICE) < lengths[:, None]).transpose(0, 1).flatten(1)
        scales = torch.rand(2, of_keys, device=DEVICE) + 0.5 if kind is narrow else torch.ones(2, 1, device=DEVICE)
        if latent:
            scales[1] = scales[0]
        keys_of, values = (
            everyones(x.float()[order.long()].flatten(1, 2) * of[:, None]).transpose(0, 1).flatten(1, 2)
            for x, of in ((k, scales[0]), (v[..., :value_dim], scales[1]))
        )
        scores = torch.einsum("bhgd,bkhd->bhgk", q.float().view(batch, of_keys, -1, dim), keys_of) * dim**-0.5
        scores.masked_fill_(~counts[:, None, None], -torch.inf)
        shares = scores.softmax(-1).nan_to_num()
        want, parts = (
            torch.einsum("bhgk,bkhd->bhgd", shares, x).view(batch, heads, value_dim) for x in (values, values.abs())
        )
        table = torch.where(needed, table, -1) if page else None
        if page and kind is not narrow:
            unused = torch.ones(count, dtype=torch.bool, device=DEVICE)
            unused[table[needed].long()] = False
            pages[unused] = torch.nan
        of_k, of_v = scales if kind is narrow else (None, None)
        how = {"block_table": table}

        def call(q=q, k=k, v=v, lengths=lengths, of=(of_k, of_v), how=how, value_dim=value_dim) -> torch.Tensor:
            if q.shape[2] > value_dim:
                return ops.mla_decode(q, k[:, :, 0], lengths, cache_scale=of[0], value_dim=value_dim, **how)
            return ops.flash_decode(q, k, v, lengths, k_scale=of[0], v_scale=of[1], **how)

        title = f"decode of pages of {page}, {batch}x{heads}x{dim} {kind}"
        runs(title, call, lambda c, want=want, parts=parts, title=title: compare(title, c, want, parts))


def check_sequence_attention(only: slice) -> None:
    for tokens, causal, zigzag, ring in [(6, True, True, False), (1500, True, True, True), (4096, False, False, False)][
        only
    ]:
        q, k, v = random(1, tokens, 8, 128), random(1, tokens, 2, 128), random(1, tokens, 2, 128)
        mine = ops.sequence_positions(tokens, zigzag=zigzag).to(DEVICE)
        order = everyones(mine).flatten().argsort()
        k_all, v_all = (everyones(x).transpose(0, 1).flatten(1, 2)[:, order].float().transpose(1, 2) for x in (k, v))
        mask = mine[:, None] >= torch.arange(SIZE * tokens, device=DEVICE) if causal else None
        want, parts = (
            torch.nn.functional.scaled_dot_product_attention(
                q.float().transpose(1, 2), k_all, values, attn_mask=mask, enable_gqa=True
            ).transpose(1, 2)
            for values in (v_all, v_all.abs())
        )
        title = f"sequence_attention {tokens}{' causal' * causal}{' ring' * ring}"
        runs(
            title,
            lambda q=q, k=k, v=v, how=(causal, zigzag, ring): ops.sequence_attention(
                q, k, v, causal=how[0], zigzag=how[1], ring=how[2]
            ),
            lambda c, want=want, parts=parts, title=title: compare(title, c, want, parts),
        )


def check_attention_gradients(only: slice) -> None:
    for tokens, causal, zigzag in [(200, True, True), (512, False, False)][only]:
        shapes = ((1, tokens, 8, 128), (1, tokens, 2, 128), (1, tokens, 2, 128))
        q, k, v = (random(*shape).requires_grad_() for shape in shapes)
        mine = ops.sequence_positions(tokens, zigzag=zigzag).to(DEVICE)
        places = everyones(mine).flatten()
        whole = [everyones(x.detach()).transpose(0, 1).flatten(1, 2).float().requires_grad_() for x in (q, k, v)]
        mask = places[:, None] >= places if causal else None
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in whole), attn_mask=mask, enable_gqa=True
        ).transpose(1, 2)
        above = random(*q.shape)
        want.backward(everyones(above).transpose(0, 1).flatten(1, 2).float())
        title = f"gradients of sequence_attention {tokens}{' causal' * causal}"
        for turn in range(3):
            poison()
            if turn % SIZE == RANK:
                torch.cuda._sleep(LATE_CYCLES)
            made = ops.sequence_attention(q, k, v, causal=causal, zigzag=zigzag)
            for name, got, full in zip("qkv", torch.autograd.grad(made, (q, k, v), above), whole, strict=True):
                want, scale = full.grad.chunk(SIZE, 1)[RANK], 8 * full.grad.abs().mean()  # of the subtracted values
                compare(f"{title}: {name}", got, want, want.abs() + scale)
            given = [x.detach() for x in (q, k, v)]
            made = ops.sequence_attention_forward(*given, causal=causal, zigzag=zigzag)
            found = ops.sequence_attention_backward(above, *given, *made, causal=causal, zigzag=zigzag)
            for name, got, full in zip("qkv", found, whole, strict=True):
                want, scale = full.grad.chunk(SIZE, 1)[RANK], 8 * full.grad.abs().mean()
                compare(f"{title}, from a result: {name}", got, want, want.abs() + scale)
        say(f"PASS {title}")


if __name__ == "__main__":
    main({name: function for name, function in globals().items() if name.startswith("check_")})
