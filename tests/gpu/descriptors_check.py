# SPDX-License-Identifier: MIT
"""GEMMs of operands that descriptors name, on one GPU with `wgmma`: `python tests/gpu/descriptors_check.py [names]`.

Small integers, so that all sums are exact: results must equal float64 and the emulator. Outputs hold other numbers
before. Prints PASS or FAIL for each program.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.emulator.test_wgmma import CASES, by_hand, emitted, integers  # noqa: E402
from tests.gpu import named_checks  # noqa: E402

LIMIT_S = 140.0


def emitted_product(name: str) -> None:
    """Instructions that TileLang's emitter writes."""
    (m, n, k), kind, total, transposes = CASES[name][:4]
    a, b = integers((m, k), kind, 1), integers((n, k) if transposes else (k, n), kind, 2)
    c = torch.full((m, n), 85, device="cuda").to(getattr(torch, total))
    tilescale.compile(emitted(T, *CASES[name]))(a.cuda(), b.cuda(), c)
    assert torch.equal(c.cpu().double(), a.double() @ (b.double().T if transposes else b.double()))


def product_by_hand(adds: int) -> None:
    """Core matrices without a swizzle, sums in buffers of threads."""
    a, b, c = integers((64, 32), "float16", 1), integers((8, 16), "float16", 2), integers((64, 8), "float32", 3)
    found = c.cuda()
    tilescale.compile(by_hand(1, adds, rows=8))(a.cuda(), b.cuda(), found)
    assert torch.equal(found.cpu(), adds * c + a[:, 16:].float() @ b.float().T)


if __name__ == "__main__":
    checks = [(name, partial(emitted_product, name)) for name in CASES]
    named_checks.run([*checks, *((f"by hand, adds {n}", partial(product_by_hand, n)) for n in (0, 1))], LIMIT_S)
