"""One self-contained HTML page of a bench: what was run, whether it verified, and plots fit for a talk.

`document.render` makes the page out of `data.ReportData`. Everything is drawn here as SVG with the standard library:
the operator's tool needs no plotting package, and the page needs no network and no script.
"""

from __future__ import annotations
