"""Translations for gpt2: with nothing split they change nothing."""

from weft.compat.modelparallel.tensor_parallel import no_hooks, same_state_dict

translate_state_dict_to_hf_gpt2 = same_state_dict
translate_hf_state_dict_to_smdistributed_gpt2 = same_state_dict
get_hf_gpt2_transformer_layer_hooks = no_hooks
