"""Translations for gptj: with nothing split they change nothing."""

from weft.compat.tensor_parallel import same_state_dict

translate_state_dict_to_hf_gptj = same_state_dict
translate_hf_state_dict_to_smdistributed_gptj = same_state_dict
translate_hf_gptj_state_dict_to_smdistributed = same_state_dict
translate_hf_gptj_state_dict_to_smdistributed_gptj = same_state_dict
