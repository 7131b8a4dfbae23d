"""Hugging Face checkpoint directories: get (makes one, from a hub, a file or a package), config (config.json →
ModelConfig), describe (ModelConfig → config.json), files (the files of a directory), layouts (their tensor names ↔
ours), convert (check and load), served (between a directory and a version). Nothing is imported here, so that
configurations are read without torch.
"""
