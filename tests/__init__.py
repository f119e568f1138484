"""Tests, in the folders of what they test; what several folders share is in `support`."""
