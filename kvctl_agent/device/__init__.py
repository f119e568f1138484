"""Devices: the CUDA driver in our words, and the one kernel that copies rows; never imports torch."""

from __future__ import annotations
