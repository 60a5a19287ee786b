# SPDX-License-Identifier: MIT
"""`python -m tilescale.ops.install`: which of PyTorch's operators `tilescale.ops.install` replaces, and how it went."""

from __future__ import annotations

import torch

from tilescale.ops.symm_mem import IMPLEMENTATIONS, installed


def main() -> None:
    """Replace the operators, print what runs for each, and put them back."""
    with installed():
        for name, implementation in IMPLEMENTATIONS.items():
            schema = getattr(torch.ops.symm_mem, name).default._schema
            print(f"symm_mem::{name}: {(implementation.__doc__ or '').split('.')[0]}\n    {schema}")
    print("Inputs that are not supported run PyTorch's implementation, with a warning that says why.")


if __name__ == "__main__":
    main()
