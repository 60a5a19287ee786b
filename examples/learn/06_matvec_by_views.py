# SPDX-License-Identifier: MIT
"""Matrix times vector, with views: declare how tensors are split over the devices, and multiply the local shares.

    y = A x          A, 64 x 192              x                    y on device r
                  |  0  |  1  |  2  |      device 0: x[0:64]       A[:, share r] x[share r]
    3 devices:    |     |     |     |      device 1: x[64:128]     then the sum over the devices
                   columns, a share each   device 2: x[128:192]

The parameters have the global shapes; each device passes its share. `T.view` at device level declares the split, and
returns a tensor of the share's shape, indexed from zero. The results of the shares are parts of y. Their sum over the
devices is y, which every device must have.

Use:
    T.view(X, layout=T.FullRow)     split along the first dimension, a share for each device
    T.view(X, layout=T.FullCol)     along the last
    T.view(X, layout=T.Replica)     not split: the whole on each
    T.allreduce(X)                  in a device phase: the sum of a whole tensor over the devices

Hints:
    A vector has one dimension, which is the first and the last.
    `share` columns of A are local: a loop over them starts at zero on every device.
"""

import learn

import tilescale.language as T

M, K = 64, 192
ROWS, STEP = 16, 4


def program(devices: int):
    """Write three parts: two views, the loads of the tiles, and the final device phase."""
    share = K // devices

    @T.prim_func
    def matvec(A: T.Tensor((M, K), "float32"), x: T.Tensor((K,), "float32"), y: T.Tensor((M,), "float32")):
        with T.Kernel(device=devices, block=M // ROWS, threads=128) as b:
            with T.Scale("device"):
                learn.todo("A_dev and x_dev: the views of A and x that say how they lie over the devices")
            with T.Scale("block"):
                a = T.alloc((ROWS, STEP), "float32", level="l1")
                v = T.alloc((STEP,), "float32", level="l1")
                products = T.alloc((ROWS, STEP), "float32", level="l0")
                total = T.alloc((ROWS,), "float32", level="l0")
                T.clear(total)
                for k in T.serial(share // STEP):
                    learn.todo("load `a` from A_dev and `v` from x_dev")
                    for i, j in T.Parallel(ROWS, STEP):
                        products[i, j] = a[i, j] * v[j]
                    T.reduce_sum(products, total, dim=1, clear=False)
                T.copy(total, y[b * ROWS])
            with T.Scale("device"):
                learn.todo("make y the sum over the devices")

    return matvec


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that every device ends with the whole of y."""
    A, x = learn.integers(rng, M, K), learn.integers(rng, K)
    columns = [part.contiguous() for part in A.chunk(devices, 1)]
    parts = [a @ v for a, v in zip(columns, x.chunk(devices), strict=True)]
    return learn.Case(
        args={"A": columns, "x": list(x.chunk(devices)), "y": [learn.blank(M) for _ in range(devices)]},
        want={"y": [A @ x] * devices},
        mistakes=[
            ("Every y is the part of its device: what is missing is the sum over the devices.", {"y": parts}),
            (
                "Only the share of device 0 has been multiplied. A view is indexed from zero, within the share: beyond "
                "it there is nothing, and what a copy takes from there is zero.",
                {"y": parts[:1] * devices},
            ),
        ],
    )


exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "ArgumentError": "each device passes the columns of A that are its share, and the elements of x for them. "
        "The layouts of the views have to say the same.",
        "ShapeError": "what divides among the devices is K, the columns of A and the elements of x. y has no K: every "
        "device ends with all of it.",
        "wrong values": "Block b multiplies rows b * ROWS ... of A_dev, and step k takes columns k * STEP ... of them "
        "and the elements of x_dev that multiply them.",
    },
)

if __name__ == "__main__":
    exercise.main()
