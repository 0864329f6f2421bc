"""Text as it is."""

from engine.documents.content import Content, Converted


def read(content: Content) -> Converted:
    return Converted(content.text, notes=content.decoded.notes)
