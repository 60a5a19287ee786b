# SPDX-License-Identifier: MIT
"""GPUs that run the code for a machine."""

import pytest
import torch

from tilescale.backends.cuda.target import check_processor, has_gpu
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine


@pytest.mark.parametrize(
    ("machine", "processor"),
    [("h200-sxm-8", (9, 0)), ("h100-sxm-8", (9, 0)), ("b200-sxm-8", (10, 0)), ("a100-sxm-8", (8, 0)),
     ("a100-sxm-8", (8, 9)), ("cpu-node", (7, 5))],
)  # fmt: skip
def test_a_gpu_runs_code_of_its_kind(machine: str, processor: tuple[int, int]):
    check_processor(Machine.load(machine), processor, "a GPU")


@pytest.mark.parametrize(
    ("machine", "processor"),
    [("h200-sxm-8", (8, 0)), ("h200-sxm-8", (10, 0)), ("b200-sxm-8", (10, 3)), ("rtx4090-pcie-2", (8, 6)),
     ("a100-sxm-8", (9, 0))],
)  # fmt: skip
def test_another_one_is_told_what_to_name(machine: str, processor: tuple[int, int]):
    made = Machine.load(machine)
    found = f"machine '{machine}', compute capability {made.identify.architecture}; this GPU, NVIDIA X, has "
    with pytest.raises(UnsupportedError, match=found + f"{processor[0]}.{processor[1]}") as caught:
        check_processor(made, processor, "NVIDIA X")
    assert "TILESCALE_MACHINE" in caught.value.hint


def test_a_process_forked_from_one_that_uses_a_gpu_knows_that_there_is_one(monkeypatch: pytest.MonkeyPatch):
    """CUDA finds none there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not has_gpu()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert has_gpu()
