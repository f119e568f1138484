"""vLLM's connector interface without vLLM, for tests of `kvctl_agent.integrations.vllm`.

`stand_ins` has the classes, `modules` puts them in the place of vLLM, `compare` holds them against the real ones, and
`server` drives the connector as vLLM's scheduler and workers do, over real agents.
"""
