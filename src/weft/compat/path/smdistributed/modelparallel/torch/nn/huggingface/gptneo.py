"""Translations and hooks for gptneo."""

from weft.compat.modelparallel.tensor_parallel.huggingface import gptneo_hooks, translations

translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo = translations("gptneo")
get_hf_gptneo_transformer_layer_hooks = gptneo_hooks
translate_hf_gptneo_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
