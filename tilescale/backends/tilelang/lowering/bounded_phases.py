# SPDX-License-Identifier: MIT
"""Bounded waits for phases of mbarriers: a rewrite of the text that stock TileLang generates.

Why: TileLang's waits have no bound, and a phase that a fault of the program or of a compiler leaves incomplete hangs
the GPU for ever. Before: arrays of mbarriers. After: their waits read the clock after a failed attempt.
Threads can neither use a tile that did not arrive nor continue alone, so a wait beyond the bound writes a report into
the host's memory, and ends the grid with an error. The host sets the bound, and the address of the report, in each
module that is loaded: kernels take no more parameters.
"""

from __future__ import annotations

import re

STATE = b"tilescale_phases"
"""The symbol of a module with such waits: the bound in nanoseconds, then the address of the report."""

NAMES = 232
"""Maximum number of bytes of a kernel's and a barrier's name in a report, with a space between them and a zero."""

_WAITS = r"""#ifndef TILESCALE_PHASES
#define TILESCALE_PHASES(kernel, name) \
  struct name##_phases : Barrier { \
    TL_DEVICE void wait(uint32_t parity, uint32_t index) const { \
      tilescale::await_phase(this, parity, index, #kernel " " #name); \
    } \
  }; \
  auto name = reinterpret_cast<name##_phases*>(name##_mem)

namespace tilescale {
struct PhaseReport {
  int is_complete, x, y, z, index, parity;
  char names[232];
};
struct Phases {
  unsigned long long limit_ns;
  PhaseReport* report;
  int is_reported;
};
extern "C" __device__ volatile Phases tilescale_phases = {~0ull, nullptr, 0};

// The first thread that is late leaves a report, and ends the grid for all others.
extern "C" __device__ __noinline__ __attribute__((used)) void tilescale_end_at_phase(unsigned index, unsigned parity,
                                                                                 const char* names) {
  if (atomicExch(const_cast<int*>(&tilescale_phases.is_reported), 1) != 0)
    for (;;) __nanosleep(1000000);
  volatile PhaseReport* report = tilescale_phases.report;
  report->x = blockIdx.x;
  report->y = blockIdx.y;
  report->z = blockIdx.z;
  report->index = index;
  report->parity = parity;
#pragma unroll 1
  for (int i = 0; i < 231 && names[i] != 0; ++i) report->names[i] = names[i];
  __threadfence_system();
  report->is_complete = 1;
  __threadfence_system();
  __trap();
}

// PTX ISA, mbarrier.try_wait: a thread sleeps until the phase is complete, for 10 ms at most. The first attempt is all
// that a wait costs in time. It is one statement, as TileLang's: nvcc unrolls the loops around it as before, and keeps
// no register for a way back from the report. Names of memory are no operands: these would take registers.
__device__ __forceinline__ void await_phase(const void* barrier, unsigned parity, unsigned index, const char* names) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 begin, now, limit;\n.param .b32 a, b;\n.param .b64 c;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 10000000;\n"
      "@p bra DONE;\n"
      "mov.u64 begin, %%globaltimer;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 10000000;\n"
      "@p bra DONE;\n"
      "mov.u64 now, %%globaltimer;\n"
      "sub.u64 now, now, begin;\n"
      "ld.volatile.global.u64 limit, [tilescale_phases];\n"
      "setp.le.u64 p, now, limit;\n"
      "@p bra AGAIN;\n"
      "st.param.b32 [a], %2;\nst.param.b32 [b], %1;\nst.param.b64 [c], %3;\n"
      "call.uni tilescale_end_at_phase, (a, b, c);\n"
      "trap;\nexit;\n"
      "DONE:\n}\n" ::"r"(address), "r"(parity), "r"(index), "l"(names));
}
}  // namespace tilescale
#endif

"""

_KERNEL = re.compile(r'^extern "C" __global__ void (?:__\w+__\([^)]*\) )*(\w+)\(', re.MULTILINE)
_BARRIERS = re.compile(r"^( *)auto (\w+) = reinterpret_cast<Barrier\*>\(\2_mem\);$", re.MULTILINE)
_WAIT = re.compile(r"^( *\w+\[(.*)\]\.wait\(.*)\);$", re.MULTILINE)


def bounded_phases(text: str) -> str:
    """Bound the waits for phases of the mbarriers that a text declares."""
    if not _BARRIERS.search(text):
        return text
    kernels = list(_KERNEL.finditer(text))

    def declared(found: re.Match[str]) -> str:
        kernel = [kernel for kernel in kernels if kernel.start() < found.start()][-1]
        return f"{found[1]}TILESCALE_PHASES({kernel[1]}, {found[2]});"

    begin = kernels[0].start()
    return text[:begin] + _WAITS + _WAIT.sub(r"\1, \2);", _BARRIERS.sub(declared, text)[begin:])
