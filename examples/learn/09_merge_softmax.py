# SPDX-License-Identifier: MIT
"""Merge softmax: attention over keys that are split over several devices.

    keys        0 ... 11          12 ... 23          24 ... 35
    device         0                  1                  2               Out_r = softmax(S_r) V_r
    has       Out_0, Lse_0 --.   Out_1, Lse_1 --.   Out_2, Lse_2         Lse_r = log sum exp(S_r)
                             '---> merge        '---> merge  --->  Out, Lse over all keys, on every device

S_r and V_r are the scores and values of the keys of device r. They do not determine the softmax over all keys. But the
result and one number for each row, the logarithm of the sum of exponentials, are enough to merge any two partial
results into one:

    Lse = log(exp(Lse_a) + exp(Lse_b))          Out = exp(Lse_a - Lse) Out_a + exp(Lse_b - Lse) Out_b

An all-reduce adds up, or takes the maximum. With `fn=` it uses your combination, also of several tensors together.

Use:
    T.allreduce(X, y, fn=merge)       merge((x_a, y_a), (x_b, y_b)) returns (x, y); all are scalars, y one for each row
    T.exp, T.log, T.max(a, b)

Hints:
    The scores are large: exp(300) overflows float32. What does exp see if you subtract the larger of the two first?
    The order in which parts are merged is not yours to choose: the result of a merge is merged again.
"""

import learn
import torch

import tilescale.language as T

ROWS, WIDTH = 16, 8
KEYS = 12  # of each device


def merge(a, b):
    """Merge two (out, lse) into the result over the keys of both."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    return learn.todo("weigh out_a and out_b, and make one lse of the two")


def program(devices: int):
    """Write `merge` above, and the all-reduce."""

    @T.prim_func
    def merge_softmax(Out: T.Tensor((ROWS, WIDTH), "float32"), Lse: T.Tensor((ROWS,), "float32")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                learn.todo("all-reduce Out and Lse together, with `merge`")

    return merge_softmax


# -- the check: nothing to write below ---------------------------------------------------------------------------------


def case(devices, rng):
    """Check that every device ends with the attention over all keys."""
    scores = torch.linspace(1, 100, ROWS)[:, None] * learn.reals(rng, ROWS, devices * KEYS).double()
    values = learn.reals(rng, devices * KEYS, WIDTH).double()
    parts = list(zip(scores.chunk(devices, 1), values.chunk(devices), strict=True))
    out = [(s.softmax(1) @ v).float() for s, v in parts]
    lse = [s.logsumexp(1).float() for s, _ in parts]
    mean, top = sum(out) / devices, torch.stack(lse).amax(0)
    return learn.Case(
        args={"Out": out, "Lse": lse},
        want={"Out": [scores.softmax(1) @ values] * devices, "Lse": [scores.logsumexp(1)] * devices},
        mistakes=[
            ("Out and Lse are the sums over the devices: did you pass fn=merge?", {"Out": [sum(out)] * devices}),
            ("Out is what the device had before: nothing was merged.", {"Out": out}),
            ("Out is the mean of the parts: weigh each by exp(its Lse - that of both).", {"Out": [mean] * devices}),
            ("Lse is the largest of the parts: the log of the sum of weights is missing.", {"Lse": [top] * devices}),
        ],
        tolerance=1e-4,
    )


TRACED = (
    "merge is called while the program is traced. What it gets are no numbers yet but expressions: two pairs of them, "
    "if the all-reduce is of two tensors. They take T.max, T.exp and T.log; math and torch want numbers."
)

exercise = learn.Exercise(
    __file__,
    program,
    case,
    advice={
        "UsageError": "tensors that belong together go into one all-reduce, T.allreduce(Out, Lse, fn=merge), and merge "
        "returns as many values as it combines: an out and an lse.",
        "ValueError": TRACED,
        "TypeError": TRACED,
        "ShapeError": "the tensor with more dimensions comes first, then the one with a number for each row.",
        "wrong values": "If there is inf or nan, an exponential was too large or all were zero: subtract the larger "
        "Lse from both before you take exponentials, and add it again after the logarithm. Otherwise: do the two "
        "weights add up to one?",
    },
)

if __name__ == "__main__":
    exercise.main()
