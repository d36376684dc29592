"""Translations for gptj: with nothing split they change nothing."""

from weft.compat.modelparallel.tensor_parallel import no_hooks, same_state_dict

translate_state_dict_to_hf_gptj = same_state_dict
translate_hf_state_dict_to_smdistributed_gptj = same_state_dict
translate_hf_gptj_state_dict_to_smdistributed = same_state_dict
translate_hf_gptj_state_dict_to_smdistributed_gptj = same_state_dict
get_hf_gptj_transformer_layer_hooks = no_hooks
