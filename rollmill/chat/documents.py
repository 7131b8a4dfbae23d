"""Which tokens begin and end a document of plain text.

That is not how a chat begins and ends. An instruct model lists several tokens that end an answer, such as the end of a
turn or of a message before a tool call: only the end of a text ends a document.
"""

from __future__ import annotations

from rollmill.chat.chat_files import ChatFiles
from rollmill.chat.format import ChatFormat, DocumentMarks
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError

# how families of models call the end of a text
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]", "<EOS_TOKEN>")


def document_marks(format: ChatFormat, tokenizer: Tokenizer, found: ChatFiles) -> DocumentMarks:
    """The end is a known name that the checkpoint lists, or that its vocabulary has; else the checkpoint's eos."""
    known = [token for name in _ENDS if (token := tokenizer.find_token(name)) in tokenizer.special_ids]
    listed = [token for token in found.stop_tokens if token in known]
    end = [*listed, *known, *found.stop_tokens, format.stop_tokens[-1]][0]
    unsaid = found.begins_documents is None and found.begin is not None
    begins = (found.begin != end and not _marks_turns(found.begin, format)) if unsaid else found.begins_documents
    return DocumentMarks(found.begin if begins else None, end)


def _marks_turns(token: int | None, format: ChatFormat) -> bool:
    """Whether the token begins each message: some checkpoints name that one as their bos_token."""
    if token is None:
        return False
    try:
        return list(format.render_start([{"role": "user", "content": "Hello."}], [])).count(token) > 1
    except GatewayError:
        return False
