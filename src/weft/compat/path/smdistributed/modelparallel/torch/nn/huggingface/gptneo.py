"""Translations for gptneo: with nothing split they change nothing."""

from weft.compat.tensor_parallel import same_state_dict

translate_state_dict_to_hf_gptneo = same_state_dict
translate_hf_state_dict_to_smdistributed_gptneo = same_state_dict
