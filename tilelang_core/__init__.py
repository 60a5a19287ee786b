# SPDX-License-Identifier: MIT
"""The seam to stock TileLang: the only package that imports `tilelang` and `tvm`.

    version.py             which TileLang was tested, and the error for another
    ir.py                  the TIR classes, walkers and constructors that the rest of the system uses
    trace.py               tracing: the current builder, scoped regions, source lines, our own operations
    dialect.py             hooks into TileLang's front end (installed when this package is imported)
    upstream_errors.py     the user's line in errors of programs that cannot be traced
    role_schedule.py       schedules of roles: the statements of a persistent loop by role
    specialise.py          which statements stock TileLang gives to a producer
    compile.py             lowering and compiling with the stock compiler
    accesses.py            what TileLang's own statements read and write
    jit_kernel.py          its compiled kernel and the profiler, to extend; targets
    tl.py                  names of TileLang's and TVM's operations
    tiles.py               typed views of TileLang's operations on tiles
    scalars.py             typed views of those on elements, threads and barriers
    matrices.py            typed views of instructions of tensor cores and of descriptors
    layouts.py             layouts that programs give to tiles, or that are inferred, as expressions
    random_draws.py        random numbers by thread, order and vector, after lowering
    cases.py               functions on expressions that use `and`, `or`, `not` and `if`
    rules.py               what TileLang checks before it lowers
    launches.py            the forms of a launch, normalized
    stock.py               TileLang's language under one name
    loop_tiles.py          shared memory of tiles that live within an iteration of a loop
    stock_passes.py        rewrites before or after one of its passes
    logs.py                what TileLang logs while it compiles for us
    prefixes.py            the first statement of a function with which a pass fails
    products.py            distributions of a GEMM over warps
    modules.py             CUDA modules: options for some, a callback for all (installed likewise)
    parameters.py          parameters that share an annotation (installed likewise)
    reserved_names.py      variables named by words of C++ (installed likewise)
    ellipsis.py            indices with an Ellipsis (installed likewise)
    mixed_fp8.py           GEMMs of both float8 types (installed likewise)
    prover.py              Z3 for the queries of TVM's analyzer
    files.py               atomic replacement of files
    native.py              C sources for TVM-FFI, compiled and loaded
    lru.py                 a bounded dictionary, for results that are recomputed often
    records.py             nodes of TIR, and Python objects with some, as bytes
    rewrite.py             rebuilding traced functions: new parameters, buffers and statements
    mends.py               workarounds for faults of the stock compiler, before its passes
    complements.py         dividends with negated terms, in a form that the stock compiler gets right
    single_trip_loops.py   loops of at most one iteration, in a form that it leaves alone
    role_registers.py      registers that are set before or after a loop around a pipelined one
    loads_by_registers.py  pipelined loops whose loads depend on variables that they set
    loop_extents.py        extents that the body of a loop changes, evaluated once
    merged_remainders.py   indices with several remainders, in a form that it does not merge
    uneven_copies.py       copies between tiles of different extents, in a form that all instructions take
    loop_invariants.py     index arithmetic that nvcc leaves in loops, before them
    inlined_names.py       names in parallel loops, inlined before it computes their bounds
    partial_layouts.py     fragments of which TileLang leaves out elements: an error
    formulas.py            integer expressions as Python functions
    loop_ranges.py         the ranges of variables of loops and threads
    zero_trip_loops.py     waits and barriers of loops and branches that are not executed
    source_rewrites.py     rewrites of generated text, part of the key of compiled kernels

It is a leaf: it knows nothing of `tilescale`. An upstream rename is mended here.
"""

from tilelang_core.version import TESTED, TileLangCacheError, TileLangVersionError, load_tilelang, require_tilelang

require_tilelang()
load_tilelang()

from tilelang_core import dialect, ellipsis, logs, mixed_fp8, modules, parameters, reserved_names  # noqa: E402

dialect.install()
ellipsis.install()
logs.install()
mixed_fp8.install()
modules.install()
parameters.install()
reserved_names.install()

__all__ = ["TESTED", "TileLangCacheError", "TileLangVersionError", "load_tilelang", "require_tilelang"]
