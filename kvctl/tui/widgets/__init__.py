"""Widgets made of lines of text: they draw what they are given, and say which keys were pressed on what."""
