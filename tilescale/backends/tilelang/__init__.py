# SPDX-License-Identifier: MIT
"""Common parts of the back ends that generate text by stock TileLang: `cuda` and `hip`.

Folders: `lowering` (a program to TileLang functions), `headers` (device functions).
"""
