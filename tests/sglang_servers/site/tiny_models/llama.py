"""SGLang's Llama."""

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = LlamaForCausalLM
