"""Translations for bert: with nothing split they change nothing."""

from weft.compat.modelparallel.tensor_parallel import no_hooks, same_state_dict

translate_state_dict_to_hf_bert = same_state_dict
translate_hf_state_dict_to_smdistributed_bert = same_state_dict
get_hf_bert_transformer_layer_hooks = no_hooks
