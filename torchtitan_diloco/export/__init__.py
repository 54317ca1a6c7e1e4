"""Trained models for other programs: safetensors files, and folders for transformers."""
