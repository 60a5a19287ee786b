# SPDX-License-Identifier: MIT
"""`T.im2col`: one tile of the matrix whose product with the filters is a convolution."""

from __future__ import annotations

import numpy as np

from tilescale.errors import ShapeError


def im2col(
    img: np.ndarray,
    col: np.ndarray,
    nhw_step: int,
    c_step: int,
    kernel: int,
    stride: int,
    dilation: int,
    pad: int,
) -> None:
    """Fill col (pixels, channels) with tile (nhw_step, c_step) of the column matrix of img (N, H, W, C).

    Row p of the matrix is output pixel (n, h, w), w fastest; column q is channel q % C of filter tap q // C = (kh, kw),
    kw fastest. Outside the image, and past the last pixel, it is zero, as TMA's im2col mode fills. Raises ShapeError:
    img is not 4-D or col not 2-D.
    """
    if img.ndim != 4 or col.ndim != 2:
        raise ShapeError(f"im2col: image {img.shape} must be (N, H, W, C), columns {col.shape} (pixels, channels)")
    batch, height, width, channels = img.shape
    reach = dilation * (kernel - 1) + 1
    out_height, out_width = ((size + 2 * pad - reach) // stride + 1 for size in (height, width))
    pixel = nhw_step * col.shape[0] + np.arange(col.shape[0])
    n, rest = np.divmod(pixel, out_height * out_width)
    h, w = (stride * x - pad for x in np.divmod(rest, out_width))
    first, last = c_step * col.shape[1], (c_step + 1) * col.shape[1]
    for tap in range(first // channels, -(-last // channels)):
        low, high = max(first, tap * channels), min(last, (tap + 1) * channels)
        y, x = h + dilation * (tap // kernel), w + dilation * (tap % kernel)
        inside = (n < batch) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        values = img[n * inside, y * inside, x * inside, low - tap * channels : high - tap * channels]
        # A selection, not a multiplication: the element at the substitute index may be NaN.
        col[:, low - first : high - first] = np.where(inside[:, None], values, img.dtype.type(0))
