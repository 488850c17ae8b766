"""Files of models: folders, GGUF files, their tokenizers and configurations."""
