"""View of a key pair: what may be shown of it."""

from __future__ import annotations

from kvctl.views.view import Column, View

KEY = View("key", (Column("key"), Column("public"), Column("secret_file"), Column("public_file")))
