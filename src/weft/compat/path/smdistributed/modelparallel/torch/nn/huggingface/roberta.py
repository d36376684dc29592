"""Translations and hooks for roberta."""

from weft.compat.modelparallel.tensor_parallel.huggingface import bert_hooks, translations

translate_state_dict_to_hf_roberta, translate_hf_state_dict_to_smdistributed_roberta = translations("roberta")
get_hf_roberta_transformer_layer_hooks = bert_hooks
