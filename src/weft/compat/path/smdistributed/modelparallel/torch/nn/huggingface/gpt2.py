"""Translations and hooks for gpt2."""

from weft.compat.modelparallel.tensor_parallel.huggingface import gpt2_hooks, layer_translations, translations

translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2 = translations("gpt2")
get_hf_gpt2_transformer_layer_hooks = gpt2_hooks
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_layer_state_dict_to_hf_gpt2_block, translate_hf_block_state_dict_to_smdistributed = (
    layer_translations("gpt2")
)
