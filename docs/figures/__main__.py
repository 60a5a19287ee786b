# SPDX-License-Identifier: MIT
"""Draw all figures into `docs/diagrams`.

python -m docs.figures
"""

from docs.figures import FOLDER, drawn

if __name__ == "__main__":
    for name, text in drawn().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
