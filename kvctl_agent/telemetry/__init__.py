"""What an agent remembers about itself, kept so that remembering costs the hot path next to nothing.

One rule holds throughout: writers may wait for each other for the length of a few bytecodes, and never for a
reader. Readers (the admin thread) copy without a lock and accept a value that is one update old.
"""

from __future__ import annotations
