"""Export of trained models as safetensors files and as folders for transformers."""
