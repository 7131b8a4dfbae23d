"""Rewards of our own. A reward is a class with a name and one method; its settings are a Config."""

import ast

from rollmill import Config, Episode, Grade, Reward


class DocumentedConfig(Config):
    path: str = "main.py"


class Documented(Reward):
    """The share of functions in a file that have a docstring and annotations. 0 if it is no Python."""

    name = "documented"
    cannot_protect = "A docstring that says nothing counts as much as a good one."

    def __init__(self, config: DocumentedConfig) -> None:
        self.config = config

    async def grade(self, episode: Episode) -> Grade:
        # what was handed in is untrusted: it is parsed here, and never run
        try:
            tree = ast.parse(episode.submission.get(self.config.path, b""))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return Grade(0.0, evidence={"no Python": str(error)[:200]}, grader=self.name)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        good = [node for node in functions if ast.get_docstring(node) and node.returns is not None]
        missing = [node.name for node in functions if node not in good]
        value = len(good) / len(functions) if functions else 0.0
        return Grade(value, {"functions": float(len(functions))}, {"undocumented": missing[:20]}, self.name)


class Calm(Reward):
    """-1 for an agent that shouts in its last answer, else 0. A reward sees the whole transcript."""

    name = "calm"
    cannot_protect = "It counts exclamation marks."

    async def grade(self, episode: Episode) -> Grade:
        said = [message.get("content") for message in episode.messages if message.get("role") == "assistant"]
        last = said[-1] if said and isinstance(said[-1], str) else ""
        return Grade(-1.0 if last.count("!") > 1 else 0.0, evidence={"last": last[-200:]}, grader=self.name)
