"""HTML report of a bench: one self-contained page with the setup, the verdict, the results and SVG charts.

`report.render` creates the page from a saved result. The page needs no network and no script, and follows the
reader's light or dark mode. The charts are drawn by vl-convert-python, which the extra `report` installs.
"""

from __future__ import annotations
