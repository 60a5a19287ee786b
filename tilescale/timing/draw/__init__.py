# SPDX-License-Identifier: MIT
"""What people look at: timelines as text, as pictures, and as traces for Perfetto.

    text.py      duration, bound, utilisation, critical path and waits in words
    trace.py     the trace event format that Perfetto and Chrome open
    shares.py    what many engines do at a time, as shares
    picture.py   rows of units over time, by matplotlib
    files.py     what goes wrong when a file is written
"""

from tilescale.timing.draw.picture import plot
from tilescale.timing.draw.text import summary
from tilescale.timing.draw.trace import trace

__all__ = ["plot", "summary", "trace"]
