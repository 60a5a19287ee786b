# SPDX-License-Identifier: MIT
"""The plugin loader of an engine, without TILESCALE_PLUGIN: the plugin is found, and replaces nothing."""

from __future__ import annotations

import sys

from needs import SLOTS, load_plugins, needed

engine = sys.argv[1]
slot = needed(SLOTS[engine])
before = dict(vars(slot))
load_plugins(engine)
assert "tilescale.plugins" in sys.modules, "the entry point was not found"
assert "tilescale.ops.engine_plugins" not in sys.modules
assert dict(vars(slot)) == before
print("passed", flush=True)
