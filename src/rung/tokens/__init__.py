"""The tokens room: documents become token ids (tokenizer), ids become files (store), files become batches."""
