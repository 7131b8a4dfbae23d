"""Hugging Face checkpoint directories, in and out: config (their config.json → ModelConfig), files (what lies in the
directory), layouts (their names ↔ ours), convert (load and save). Nothing is imported here, so that configurations are
read without torch.
"""
