"""Files to documents: finding them, telling what they are, reading their text.

find_files     what is read of the paths a user typed
read_documents their text, with where in it pages and the like begin
"""

from engine.documents.choice import FileChoice
from engine.documents.document import (
    STDIN,
    Document,
    Found,
    FoundFile,
    Mark,
    Skipped,
    Unreadable,
)
from engine.documents.finding import find_files
from engine.documents.reading import MAX_BYTES, read_document, read_documents

__all__ = [
    "MAX_BYTES",
    "STDIN",
    "Document",
    "FileChoice",
    "Found",
    "FoundFile",
    "Mark",
    "Skipped",
    "Unreadable",
    "find_files",
    "read_document",
    "read_documents",
]
