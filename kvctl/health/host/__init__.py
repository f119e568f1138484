"""The host that kvctl runs on: limits, devices, libraries and settings that a transfer engine depends on."""
