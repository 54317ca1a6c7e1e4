"""Export of trained models as safetensors files, and for transformers and torchtitan."""
