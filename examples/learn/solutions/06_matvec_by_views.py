# SPDX-License-Identifier: MIT
"""Solution: A split by columns, x the same way, and one all-reduce.

Had A been split by rows and x not at all, every device would have its rows of y and no sum would be needed. Which split
is better depends on the layouts of A, x and y before and after.
"""

import tilescale.language as T

M, K = 64, 192
ROWS, STEP = 16, 4


def program(devices: int):
    """Multiply the local shares; the all-reduce adds the parts."""
    share = K // devices

    @T.prim_func
    def matvec(A: T.Tensor((M, K), "float32"), x: T.Tensor((K,), "float32"), y: T.Tensor((M,), "float32")):
        with T.Kernel(device=devices, block=M // ROWS, threads=128) as b:
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                x_dev = T.view(x, layout=T.FullRow)
            with T.Scale("block"):
                a = T.alloc((ROWS, STEP), "float32", level="l1")
                v = T.alloc((STEP,), "float32", level="l1")
                products = T.alloc((ROWS, STEP), "float32", level="l0")
                total = T.alloc((ROWS,), "float32", level="l0")
                T.clear(total)
                for k in T.serial(share // STEP):
                    T.copy(A_dev[b * ROWS, k * STEP], a)
                    T.copy(x_dev[k * STEP], v)
                    for i, j in T.Parallel(ROWS, STEP):
                        products[i, j] = a[i, j] * v[j]
                    T.reduce_sum(products, total, dim=1, clear=False)
                T.copy(total, y[b * ROWS])
            with T.Scale("device"):
                T.allreduce(y)

    return matvec
