"""SGLang plugin: the transfer backend `kvctl`, its takeover of the name `nixl`, and the observer of SGLang's backends.

SGLang loads `plugin.load` in each of its processes through the entry point group `sglang.srt.plugins`. Only `plugin`
and `versions` can be imported without SGLang.
"""
