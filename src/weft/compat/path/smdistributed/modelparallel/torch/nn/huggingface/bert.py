"""Translations and hooks for bert."""

from weft.compat.modelparallel.tensor_parallel.huggingface import bert_hooks, translations

translate_state_dict_to_hf_bert, translate_hf_state_dict_to_smdistributed_bert = translations("bert")
get_hf_bert_transformer_layer_hooks = bert_hooks
