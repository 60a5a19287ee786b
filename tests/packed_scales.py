# SPDX-License-Identifier: MIT
"""Scales of rows of float8 packed as exponents (UE8M0), as DeepGEMM takes them, read byte by byte."""

import torch


def unpacked(words: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The scales of each row's groups of 128, (rows, groups); the last word of a row is completed by zeros."""
    groups, high = -(-columns // 128), -(-rows // 4) * 4
    room = torch.zeros(-(-groups // 4) * high, dtype=torch.int32)
    room[: len(words)] = words.cpu()
    exponents = room.view(torch.uint8).view(-1, high, 4)[:, :rows].permute(1, 0, 2).flatten(1)
    assert not exponents[:, groups:].any(), "zeros complete a word"
    return torch.exp2(exponents[:, :groups].float() - 127)
