# SPDX-License-Identifier: MIT
"""Mutated files, and the tests that can catch mutants: few and fast ones, the nearest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.operators import Mutant, cuda_mutants, python_mutants

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Target:
    """A file and the tests of it.

    Attributes:
        part: what it belongs to, in the table.
        tests: files, or functions of them.
        functions: those that are mutated; all without.
    """

    part: str
    path: str
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()

    def mutants(self) -> Iterator[Mutant]:
        """Mutants of the present file."""
        text = (ROOT / self.path).read_text(encoding="utf-8")
        return cuda_mutants(text) if self.path.endswith(".cuh") else python_mutants(text, self.functions)


_CORPUS = "tests/corpus/test_corpus.py::test_a_mistake_is_found_at_its_line_and_nothing_else"
_MODELS = "tests/emulator/checks/test_properties.py"
_PROGRAMS = "tests/emulator/checks/test_random_programs.py"
_IN_A_PROGRAM = "tests/emulator/checks/test_races_in_a_program.py"
_REMEDIES = "tests/corpus/test_remedies.py"
_REDUNDANT = "tests/emulator/checks/test_redundant_waits.py"

_ROLES = "tilescale/backends/tilelang/lowering/role_graph"

_ROUTES = "path", "_as_path", "_scaled", "_common", "_slower", "_typical_time", "_through", "_search", "_all_hops"
"""Not those that word errors."""


def _checks(name: str, *tests: str) -> Target:
    return Target("checks of the emulator", f"tilescale/backends/emulator/checks/{name}.py", tests)


def _header(name: str) -> Target:
    tests = ("tests/cuda/test_header_orders.py",)
    return Target("device functions", f"tilescale/backends/{name}.cuh", tests)


def _order(name: str, *nearest: str) -> Target:
    near = *nearest, "test_thread_maps", "test_held_elements", "test_elements_in_order", "test_hazards"
    near = *near, "test_hazards_in_context"
    tests = tuple(f"tests/cuda/{test}.py" for test in near)
    return Target("order within a block", f"tilescale/backends/tilelang/lowering/{name}.py", tests)


def _remedies(name: str, *nearest: str) -> Target:
    first = *nearest, "tests/emulator/test_remedy_candidates.py", f"{_REMEDIES}::test_rounds_of_a_loop"
    return Target("remedies", f"tilescale/backends/emulator/{name}.py", (*first, _REMEDIES))


def _calls(path: str, *functions: str) -> Target:
    tests = ("tests/cuda/test_agreement_of_calls.py",)
    return Target("agreement of calls", f"tilescale/backends/{path}", tests, functions)


def _comm(name: str, *tests: str, functions: tuple[str, ...] = ()) -> Target:
    tests = tuple(f"tests/comm/{test}.py" for test in tests)
    return Target("digests that ranks exchange", f"tilescale/comm/{name}.py", tests, functions)


def _running(name: str, *tests: str, functions: tuple[str, ...] = ()) -> Target:
    tests = tuple(f"tests/cuda/{test}.py" for test in tests)
    return Target("calls on a GPU", f"tilescale/backends/cuda/running/{name}.py", tests, functions)


def _overlap(name: str, *tests: str) -> Target:
    tests = tuple(f"tests/overlap/{test}.py" for test in tests)
    return Target("overlap", f"tilescale/passes/overlap/{name}.py", tests)


def _heap(name: str, *tests: str) -> Target:
    near = tuple(f"tests/comm/test_heap_{test}.py" for test in tests)
    return Target("memory of the heap", f"tilescale/comm/heap/{name}.py", near)


def _persistent(name: str, *further: str) -> Target:
    tests = tuple(f"tests/persistent/test_{test}.py" for test in ("orders", "tasks", *further))
    return Target("one launch", f"tilescale/passes/persistent/{name}.py", tests)


def _decode(name: str, *tests: str) -> Target:
    near = tuple(f"tests/persistent/test_decode_{test}" for test in tests)
    return Target("decode steps", f"tilescale/ops/decode{name}.py", near)


_LAYERS = "layers.py::test_layers_are_the_reference"
_FORMS = ("several tiles of keys", "several tiles of keys in pages", "float8", "float8 with scales of rows",
          "six sequences on one device")  # fmt: skip
_SHORT = tuple(f"{_LAYERS}[{what}]" for what in _FORMS)
_EXPERTS = ("experts.py::test_layers_are_the_reference[all slots, two layers]",
            "experts.py::test_all_tokens_take_the_same_experts[ties-in order]",
            "experts.py::test_all_tokens_take_the_same_experts[one expert-in order]",
            "experts.py::test_the_ring_of_weights_leaves_space_for_tiles_of_experts")  # fmt: skip
_STEPS = ("step.py::test_logits_are_the_models[float8]", "step.py::test_weights_of_the_model_are_those_of_the_launch",
          "step.py::test_experts_of_the_model_are_those_of_the_launch", "step.py::test_unsupported_experts_are_named",
          "step.py::test_unsupported_models_are_named", "step.py::test_a_full_cache_is_an_error",
          "step.py::test_a_rank_has_its_features_of_whole_experts")  # fmt: skip
"""Those of a second each."""

_PROTOCOL = ("rendezvous", "_rendezvous", "refuse", "_arrive", "_key", "receive", "wait", "_wait", "refusal", "status",
             "rank_gone", "_stop_if_hopeless", "_stop_if_elsewhere")  # fmt: skip
"""Not those that word errors."""

TARGETS = (
    _checks("clocks", f"{_MODELS}::test_clocks_know_what_happened_before", _CORPUS),
    _checks(
        "flags",
        f"{_MODELS}::test_a_wait_sees_what_it_must_have_seen",
        f"{_MODELS}::test_a_wait_for_two_signals_learns_what_both_authors_knew",
        "tests/emulator/checks/test_flags.py",
        _REDUNDANT,
        _CORPUS,
    ),
    _checks(
        "states",
        f"{_MODELS}::test_states_keep_what_can_still_race",
        f"{_MODELS}::test_states_that_nothing_is_in_are_forgotten",
        f"{_MODELS}::test_a_state_knows_the_write_before_the_last_ones_of_a_task",
        _REDUNDANT,
        _CORPUS,
    ),
    _checks("redundant", _REDUNDANT, f"{_PROGRAMS}::test_waits_that_no_access_needs"),
    _checks(
        "races",
        _REDUNDANT,
        f"{_IN_A_PROGRAM}::test_a_wait_may_end_by_an_earlier_phase_of_the_same_parity",
        f"{_IN_A_PROGRAM}::test_what_only_one_task_reaches_costs_nothing",
        _CORPUS,
        "tests/emulator/checks/test_races_in_a_device.py",
    ),
    _checks("phases", "tests/emulator/checks/test_phases.py"),
    _checks("iterations", "tests/emulator/checks/test_races_between_iterations.py"),
    _header("cuda/headers/memory"),
    _header("tilelang/headers/sync"),
    _header("tilelang/headers/producer"),
    _header("tilelang/headers/cluster"),
    _order("hazards"),
    _order("order_state", "test_order_state"),
    _order("touches"),
    _order("thread_maps"),
    Target("order within a block", "tilescale/backends/tilelang/lowering/places.py", ("tests/cuda/test_places.py",)),
    Target("roles", f"{_ROLES}/ring_loads.py", ("tests/cuda/test_ring_loads.py",)),
    Target("layouts", "tilelang_core/partial_layouts.py", ("tests/cuda/test_partial_layouts.py",)),
    Target("uniformity of threads", "tilescale/passes/uniformity.py", ("tests/program/test_uniformity.py",)),
    Target("uniformity of threads", "tilescale/backends/tilelang/lowering/polling.py", ("tests/cuda/test_polling.py",)),
    _remedies("remedies"),
    _remedies("edits", "tests/emulator/test_edits.py"),
    Target("routes", "tilescale/hda/route.py", ("tests/hda/test_machine_routes.py",), _ROUTES),
    Target("routes", "tilescale/collectives/routes.py", ("tests/collectives/test_routes.py",)),
    _calls("cuda/running/memory.py", "digest"),
    _calls("cuda/running/barrier_kernel.py", "purpose", "site_of"),
    _calls("tilelang/lowering/implemented.py", "available"),
    _comm("session", "test_team", "test_ends_of_ranks", functions=_PROTOCOL),
    _comm("refusal", "test_team"),
    _comm("failure_log", "test_failure_log"),
    _comm("admission", "test_admission"),
    _running("copy_queue", "test_own_streams", "test_execute_queue"),
    _running("replay", "test_replay"),
    _running("wait_guard", "test_execute_failures", functions=("barrier", "blame", "_scene")),
    _running("diagnosis", "test_execute_failures"),
    _running("occupancy", "test_execute_occupancy"),
    _running("agreement", "test_execute_failures"),
    _running("control", "test_execute_calls", "test_conditions"),
    _running("execute", "test_execute_calls", "test_execute_failures", "test_where_devices_synchronize", "test_nodes"),
    _running("messages", "test_nodes", "test_messages"),
    _running("plans", "test_plans", "test_execute_calls", "test_calls_alike", "test_execute_arguments"),
    _running("queue_parts", "test_execute_queue", "test_queue_between_nodes"),
    _running("queue_watch", "test_queue_watch", "test_execute_queue"),
    _running("queued", "test_execute_queue", "test_queue_between_nodes"),
    _running("queued_exchange", "test_queue_between_nodes"),
    _running("call_table", "test_call_table", "test_recording"),
    _running("recording", "test_recording"),
    _running("repeated", "test_recording", "test_execute_calls"),
    _running("stream_memory", "test_queue_watch", "test_execute_queue"),
    _running("stream_order", "test_execute_calls", "test_execute_failures"),
    _running("timeouts", "test_execute_failures", "test_queue_watch"),
    _running("toolchain", "test_toolchain"),
    _overlap("scatter", "test_reductions", "test_reads_behind", "test_symbolic"),
    _overlap("slices", "test_several_gathers"),
    _overlap("tile_collective", "test_tile_collective"),
    _persistent("placement"),
    _persistent("counters"),
    _persistent("dependences"),
    _persistent("collectives", "chains"),
    _persistent("phases"),
    _persistent("rewrite"),
    _persistent("ring", "streams"),
    _persistent("streams", "streams"),
    _persistent("task_body"),
    _persistent("tasks"),
    _persistent("unroll"),
    Target("arguments of operators", "tilescale/ops/arguments.py", ("tests/ops/test_arguments.py",)),
    _heap("ledger", "arena"),
    _heap("arena", "arena"),
    _heap("address_map", "address_map"),
    _heap("cuda_vmm", "cuda_vmm"),
    _heap("descriptors", "descriptors", "host"),
    _heap("group", "providers", "descriptors", "host"),
    _heap("heap", "arena", "host", "cuda_vmm"),
    _heap("host", "host"),
    _heap("mapped", "cuda_vmm", "host"),
    _heap("open_heaps", "host"),
    _heap("provider", "providers"),
    _comm("team", "test_team"),
    _decode("_sizes", "sizes.py"),
    _decode("_step", *_STEPS),
    _decode("_weights", *_STEPS),
    _decode("_expert_weights", *_STEPS),
    _decode("_float8", *_SHORT, *_STEPS),
    _decode("_attention", *_SHORT),
    _decode("_program", *_SHORT),
    _decode("", *_SHORT, *_STEPS),
    _decode("_experts", *_EXPERTS),
    Target("gradients", "tilescale/ops/partial_gradients.py", ("tests/ops/test_partial_gradients.py",)),
)
