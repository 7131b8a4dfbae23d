"""The demo: micro-repositories, their demonstrations, the tokenizer and the configuration of `rollmill demo`."""

from pathlib import Path

CONFIG = Path(__file__).with_name("demo.toml")
