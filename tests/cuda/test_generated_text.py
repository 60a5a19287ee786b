# SPDX-License-Identifier: MIT
"""The checks of generated text find what must not run. Each broken text differs from the right one in one place."""

import pytest

from tilescale.backends.tilelang.lowering.check import (
    GeneratedTextError,
    check_shared,
    check_text,
    kernels,
    static_shared_bytes,
)
from tilescale.errors import AllocationTooLargeError, Location
from tilescale.hda import Machine

HEAD = 'extern "C" __global__ void __launch_bounds__(128, 1) k_kernel(const float* X, float* Y_peers, int* F, int n) {'
ONE = "  if (((int)threadIdx.x) == 0) {"
WAIT = "    tilescale::wait<tilescale::GE, int>((&(F[0])), 0, 8, 1, n, F, 0);"
SIGNAL = "    tilescale::signal<0, int>((&(F_peers[0])), 0, 8, 1, F, 1);"
LEAVE = "    tilescale::leave((&(words[0])), 4, 0, 0, 4, F, n, n, F, 3);"
BARRIER = "    tilescale::barrier((&(F[0])), 4, 0, 4, 0, F, n, F, 2);"
LOAD, STORE = "  float x = X[((int)threadIdx.x)];", "  Y_peers[((int)threadIdx.x)] = x;"
SYNC, DRAIN, ACQUIRED = "  __syncthreads();", "  tilescale::complete_stores();", "  tilescale::acquired();"

ELECT = "  if (tl::tl_shuffle_elect<128>()) {"
BULK = ["    tl::tma_store(Y_desc, (&(tile[0])), 0, 0);", "    tl::tma_store_arrive();"]

RIGHT = [HEAD, ONE, WAIT, "  }", SYNC, ACQUIRED, LOAD, STORE, DRAIN, SYNC, ONE, SIGNAL, "  }", "}"]


def without(line: str, nth: int = 0) -> str:
    at = [i for i, other in enumerate(RIGHT) if other == line][nth]
    return "\n".join(RIGHT[:at] + RIGHT[at + 1 :])


def replaced(*pairs: tuple[str, list[str]]) -> str:
    lines = list(RIGHT)
    for old, new in pairs:
        at = lines.index(old)
        lines[at : at + 1] = new
    return "\n".join(lines)


def role(*inside: str) -> list[str]:
    return ["  if (((int)threadIdx.x) < 64) {", *inside, "  }"]


def test_the_right_text_passes():
    check_text("\n".join(RIGHT))
    (kernel,) = kernels("\n".join(RIGHT))
    assert (kernel.name, kernel.threads) == ("k_kernel", 128)


@pytest.mark.parametrize(
    "text",
    [
        replaced((ONE, [DRAIN, SYNC, ONE]), (WAIT, [BARRIER])),
        replaced((SIGNAL, [SIGNAL, WAIT])).replace("  }\n}", "  }\n  __syncthreads();\n  tilescale::acquired();\n}"),
        "\n".join([HEAD, DRAIN, SYNC, "  for (int i = 0; i < 4; ++i) {", ONE, SIGNAL, "  }", "  }", "}"]),
        "\n".join([HEAD, STORE, SYNC, ELECT, "    tilescale::complete_stores();", SIGNAL, *BULK, "  }", "}"]),
        "\n".join([HEAD, STORE, SYNC, ACQUIRED, ELECT, BARRIER, "  }", SYNC, ACQUIRED, LOAD, "}"]),
        "\n".join([HEAD, *role("    tl::__sync_thread_partial<3, 64>();", LOAD), "}"]),
        "\n".join([HEAD, "  if (((int)blockIdx.x) < 3) {", *RIGHT[1:-1], "  }", "}"]),
        "\n".join([HEAD.replace("__launch_bounds__(128, 1) ", ""), WAIT, ACQUIRED, LOAD, DRAIN, SIGNAL, "}"]),
    ],
    ids=[
        *("barrier", "signal then wait", "signals in a loop", "stores after a signal", "barrier after a barrier"),
        *("partial barrier", "blocks of a condition", "one thread"),
    ],
)
def test_other_right_texts_pass(text: str):
    check_text(text)


@pytest.mark.parametrize(
    ("text", "found", "line"),
    [
        (without(DRAIN), "does not wait for the statement in line 8", 11),
        (without(SYNC, 1), "do not synchronize between their stores and a signal", 11),
        (without(SYNC, 0), "do not synchronize after a wait", 3),
        (without(ACQUIRED), "loads may run ahead of a wait", 3),
        (replaced((SYNC, [LOAD, SYNC])), "do not synchronize after a wait", 3),
        (replaced((DRAIN, [DRAIN, STORE])), "does not wait for the statement in line 10", 13),
        (replaced((WAIT, ["    if (n < 4) {", WAIT, "    }"])), "a bounds predicate around", 3),
        (replaced((ONE, ["  if ((((int)threadIdx.x) == 0) && (n < 4)) {"])), "a bounds predicate around", 2),
        (replaced((ONE, ["  if (((int)threadIdx.x) < 64) {"])), "more than one thread", 3),
        (replaced((LOAD, role(SYNC, LOAD))), "a barrier of the block in a branch", 8),
        (replaced((LOAD, ["  float x = __ldg(X + n);"])), "a read-only load of 'X'", 7),
        (replaced((LOAD, ["  float x = __ldg(Y_peers + n);"])), "a read-only load of 'Y_peers'", 7),
        (replaced((HEAD, [HEAD.replace("float* X", "float* __restrict__ X")])), "__restrict__", 1),
        (
            "\n".join([HEAD, ONE, SIGNAL, "  }", "}"]),
            "a signal before the stores that it publishes are complete",
            3,
        ),
        (
            "\n".join([HEAD, DRAIN, SYNC, "  for (int i = 0; i < 4; ++i) {", ONE, SIGNAL, "  }", STORE, "  }", "}"]),
            "does not wait for the statement in line 8",
            6,
        ),
        (
            "\n".join(
                [HEAD, *role("  tl::tma_load(d, b, s, 0, 0);")[:-1], "  } else {", ONE, WAIT, "  }"]
                + ["    tl::__sync_thread_partial<3, 64>();", ACQUIRED, "  }", "}"]
            ),
            "a wait outside the role that loads in line 3",
            6,
        ),
    ],
)
def test_a_broken_text_is_found(text: str, found: str, line: int):
    with pytest.raises(GeneratedTextError, match=rf"k_kernel: .*in line {line} of the generated text") as caught:
        check_text(text, frozenset({"X"}))
    assert found in str(caught.value)


GATE = "      tilescale::wait_by_producer<tilescale::GE, int>((&(F[0])), 0, 8, 1, n, F, 0);"
LOOP, BULK = "    for (int k = 0; k < 4; ++k) {", "      tl::tma_load(X_desc, b, s, 0, 0);"
ELECT, TMA_STORE = "  if (tl::tl_shuffle_elect<128>()) {", "    tl::tma_store(Y_peers_desc, s, 0, 0);"
ISSUED = "\n".join([ELECT, BULK, "  }"])
KEEP, RELEASE = "    kept0 = tilescale::address((&(F[0])), 0, 8, F, 0);", "    tilescale::release<0, int>(kept0, 1);"


def gated(*loop: str, others: tuple[str, ...] = ()) -> str:
    producer = ["  if (((int)threadIdx.x) < 64) {", LOOP, *loop, "    }"]
    return "\n".join([HEAD, *producer, "  } else {", *others, "  }", "}"])


def loaded_by_warp(end: int) -> str:
    lines = [HEAD, "  if (256 <= ((int)threadIdx.x)) {", f"    if (((int)threadIdx.x) < {end}) {{", LOOP, GATE]
    return "\n".join([*lines, ISSUED.replace("elect<128>", "elect<32>"), "    }", "    }", "  }", "}"])


def entered(*before: str) -> str:
    """A producer next to threads that wait until other devices have arrived."""
    enter = "    tilescale::enter((&(words[0])), 4, 0, 0, 4, F, n, n, F, 3);"
    loads = ["  if (128 <= ((int)threadIdx.x)) {", *before, "  } else {"]
    return "\n".join([HEAD, *loads, ONE, enter, "  }", "  tl::__sync_thread_partial<3, 128>();", ACQUIRED, "  }", "}"])


def test_a_loader_beside_the_entry_of_a_grid_loads_nothing_from_peers():
    check_text(entered(ISSUED))
    with pytest.raises(GeneratedTextError, match="outside the role that loads from them in line 4"):
        check_text(entered(ISSUED.replace("X_desc", "Y_peers_desc")))


def elected(*inside: str, sync: str = SYNC, elect: str = ELECT) -> list[str]:
    return [sync, elect, *inside, "  }"]


def kept(*turn: str, after: tuple[str, ...] = ()) -> str:
    return "\n".join([HEAD, "  for (int w = 0; w < n; ++w) {", *turn, "  }", *after, "}"])


HELD = (ONE, WAIT, "  }", "    tl::__sync_thread_partial<3, 64>();", ACQUIRED)
WAITING = [ONE, WAIT, "  }", SYNC, ACQUIRED]
FLUSHED = elected(DRAIN, RELEASE)


@pytest.mark.parametrize(
    "text",
    [
        gated(ISSUED.replace("X_desc", "O_desc"), GATE, ISSUED),
        loaded_by_warp(288),
        gated("      released[0].wait(0);", BULK.replace("X_desc", "Z_desc"), others=HELD),
        gated(GATE, ISSUED).replace("    }\n  } else", "\n".join(["    }", LOOP, GATE, ISSUED, "    }", "  } else"])),
        gated("      if (k == 0) {", GATE, "      }", ISSUED),
        gated(BULK, others=("    tl::__sync_thread_partial<3, 64>();", LOAD)),
        gated(BULK, others=HELD),
        "\n".join([HEAD, ELECT, TMA_STORE, "  }", *elected(DRAIN, SIGNAL), "}"]),
        "\n".join([HEAD, *elected("    tilescale::complete_stores<2>();", "for (;;) {", SIGNAL, "}"), "}"]),
        kept(*FLUSHED, *WAITING, KEEP, after=tuple(FLUSHED)),
        "\n".join([HEAD, ELECT, TMA_STORE, "  }", *elected(LEAVE), "}"]),
        "\n".join([HEAD, ELECT, TMA_STORE, "  }", DRAIN, SYNC, ONE, LEAVE, "  }", "}"]),
    ],
    ids=[
        "gate",
        "what it does not order",
        "one warp",
        "released",
        "two loops",
        "producer",
        "unordered loads",
        "issuer",
        "some left",
        "kept",
        "drains itself",
        "drained by all",
    ],
)
def test_texts_with_roles_pass(text: str):
    check_text(text, ahead=frozenset({"X"}), free=frozenset({"O"}))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (gated(BULK, "      if (k == 0) {", GATE, "      }"), "a wait does not come before the load in line 4"),
        (gated(GATE).replace("}\n  } else", "}\n" + BULK + "\n  } else"), "does not come before the load in line 6"),
        (gated(BULK, others=(GATE,)), "a wait outside the role that loads"),
        (gated(BULK.replace("X_desc", "Z_desc"), others=HELD), "a wait outside the role that loads"),
        (gated(ELECT, GATE, "  }", BULK), "a producer's wait in a branch of one thread"),
        (gated(GATE, BULK), "a producer waits for what other threads load in line 5"),
        (loaded_by_warp(288).replace("elect<32>", "elect<64>"), "a producer waits for what other threads load"),
        (loaded_by_warp(320), "a producer waits for what other threads load"),
        (
            gated(BULK.replace("X_desc", "Z_desc"), "      released[0].wait(0);", others=HELD),
            "a wait outside the role that loads",
        ),
        (gated(BULK, LOOP, GATE, BULK, "    }"), "a wait does not come before the load in line 4"),
        ("\n".join([HEAD, ELECT, TMA_STORE, "  }", *elected(SIGNAL, DRAIN), "}"]), "before the stores"),
        ("\n".join([HEAD, ELECT, TMA_STORE, "  }", *elected(DRAIN, SIGNAL)[1:], "}"]), "threads do not synchronize"),
        ("\n".join([HEAD, ELECT, TMA_STORE, "  }", *elected(LEAVE)[1:], "}"]), "threads do not synchronize"),
        ("\n".join([HEAD, ELECT, TMA_STORE, "  }", *elected(LEAVE, elect=ONE), "}"]), "another thread than the one"),
        (
            "\n".join([HEAD, ELECT.replace("128", "0"), TMA_STORE, "  }", *elected(DRAIN, SIGNAL), "}"]),
            "a signal by another thread than the one that stores in line 3",
        ),
        ("\n".join([HEAD, *elected(DRAIN, STORE, SIGNAL), "}"]), "does not wait for the statement in line 5"),
        (kept(*FLUSHED, *WAITING, KEEP), "a signal that is kept back is never sent"),
        (kept(*WAITING, *FLUSHED, KEEP, after=tuple(FLUSHED)), "a signal that is kept back across a wait"),
    ],
)
def test_a_text_with_wrong_roles_is_found(text: str, found: str):
    with pytest.raises(GeneratedTextError, match=r"k_kernel: ") as caught:
        check_text(text, ahead=frozenset({"X"}))
    assert found in str(caught.value)


def test_read_only_loads_of_a_devices_own_tensors_pass():
    check_text(replaced((LOAD, ["  float x = __ldg(X + n);"])), frozenset({"F"}))


def test_static_shared_memory_is_counted():
    text = [
        "  __shared__ __align__(16) uint64_t m[4];",
        "  extern __shared__ uchar b[];",
        "  __shared__ half_t t[2][8];",
    ]
    assert static_shared_bytes("\n".join(text)) == 32 + 32


@pytest.mark.parametrize("machine", ["h200-sxm-8", "a100-sxm-8"])
def test_too_much_shared_memory_is_the_users_error(machine: str):
    described = Machine.load(machine)
    available = described.capacity("l1")
    check_shared("f", available, described)
    place = Location("user.py", 3)
    with pytest.raises(AllocationTooLargeError, match=f"'f' takes {available + 1} bytes.*has {available}") as caught:
        check_shared("f", available + 1, described, [place])
    assert caught.value.where == (place,) and caught.value.hint
