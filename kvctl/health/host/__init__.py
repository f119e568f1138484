"""Checks the host that kvctl runs on: limits, devices, libraries and settings that transfer engines depend on."""
