# SPDX-License-Identifier: MIT
"""`python -m tilescale.ops.install`: what `tilescale.ops.install` replaces."""

from __future__ import annotations

import torch

from tilescale.ops.symm_mem import IMPLEMENTATIONS, PATTERNS, installed


def main() -> None:
    """Replace the operators, print the implementation of each, and restore them."""
    with installed():
        for name, implementation in IMPLEMENTATIONS.items():
            schema = getattr(torch.ops.symm_mem, name).default._schema
            print(f"symm_mem::{name}: {(implementation.__doc__ or '').split('.')[0]}\n    {schema}")
    print("Inputs that are not supported run PyTorch's implementation, with a warning that says why.\n")
    print("With graphs=True, what torch.compile compiles from then on:")
    for pattern, operator in PATTERNS.items():
        print(f"{pattern} -> tilescale.ops.{operator}")
    print("Patterns that are not supported stay as they are; tilescale.ops.graph_patterns.replaced counts all.")


if __name__ == "__main__":
    main()
