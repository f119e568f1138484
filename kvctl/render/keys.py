"""View of a key pair without its secret."""

from __future__ import annotations

from kvctl.render.view import Column, View

KEY = View("key", (Column("key"), Column("public"), Column("secret_file"), Column("public_file")))
