"""A prompt given as one text with separators, split at them before anything is tokenized."""

from dataclasses import dataclass

from cache_store.errors import UsageError


@dataclass(frozen=True)
class PromptText:
    """The parts of a prompt: `instructions` ("" where there are none), the chunks' texts as they
    are, and the question."""

    instructions: str
    chunks: tuple[str, ...]
    question: str

    @classmethod
    def split(cls, text: str, separator: str) -> "PromptText":
        """Splits "instructions SEPARATOR chunk SEPARATOR … SEPARATOR question".

        The first part is the instructions and the last one the question, so that a text without a
        separator is a question alone. Blank chunks are left out. At the very beginning and end of
        the text a separator counts without its outer blanks too: texts get stripped on their way.
        Raises UsageError for an empty separator and where no question follows the last one.
        """
        if not separator:
            raise UsageError("the separator is empty", "give the text that stands between chunks")
        begins, ends = separator.lstrip(), separator.rstrip()
        if begins and text.startswith(begins):
            text = separator + text.removeprefix(begins)
        if ends and text.endswith(ends):
            text = text.removesuffix(ends) + separator
        *before, question = text.split(separator)
        if not question.strip():
            where = "after its last separator" if before else "in it"
            raise UsageError(f"the prompt has no question {where}", "end it with the question")
        chunks = tuple(chunk for chunk in before[1:] if chunk.strip())
        return cls(before[0] if before and before[0].strip() else "", chunks, question)
