# SPDX-License-Identifier: MIT
"""Lowering of programs to plain TileLang functions and host operations.

Folders: `clusters` (programs of a cluster) and `groups` (units inside a program), a stage each; `copies` (a mechanism
each); `role_graph` (roles of threads, and the channels between them).
"""
