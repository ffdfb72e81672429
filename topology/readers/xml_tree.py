"""A small, safe XML reader: elements with their line numbers, limits against hostile files, no entities, no DTD."""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax import SAXException, SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesImpl, Locator

from defusedxml import DefusedXmlException  # type: ignore[import-untyped]  # ships no annotations
from defusedxml.sax import parse  # type: ignore[import-untyped]

from gradwire.topology.errors import TopologyError

MAX_DEPTH = 64
"""Nested elements; NCCL's own parser stops at 256 nodes in all."""
MAX_ELEMENTS = 200_000
"""Enough for any machine and small enough to be read in a second."""


def allowed(text: str) -> str:
    """Returns a text with `?` in place of the characters that XML 1.0 does not allow.

    Args:
        text: Any text, such as a device's name.
    """
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


@dataclass(slots=True)
class Element:
    """Describes one element of an XML file; text between elements is not kept."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list["Element"] = field(default_factory=list)

    def all(self, tag: str) -> Iterator["Element"]:
        """Yields the children with this tag.

        Args:
            tag: Name of the element.
        """
        return (child for child in self.children if child.tag == tag)

    def text(self, name: str) -> str | None:
        """Returns an attribute's text, or None where it is absent or empty.

        Args:
            name: Name of the attribute.
        """
        return self.attributes.get(name, "").strip() or None

    def integer(self, name: str) -> int | None:
        """Returns an attribute as a number of 0 or more (hexadecimal after 0x), or None if it is absent or no number.

        Args:
            name: Name of the attribute.
        """
        match = re.fullmatch(r"(0[xX][0-9a-fA-F]{1,16})|([0-9]{1,19})", self.text(name) or "")
        if match is None:
            return None
        return int(match[1], 16) if match[1] else int(match[2])


class _Builder(ContentHandler):
    """Builds the tree of elements, and raises TopologyError beyond the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count = 0
        self._locator: Locator | None = None

    def setDocumentLocator(self, locator: Locator) -> None:
        self._locator = locator

    def startElement(self, name: str, attrs: AttributesImpl) -> None:
        line = (self._locator.getLineNumber() if self._locator else None) or 0
        self._count += 1
        if len(self._open) >= MAX_DEPTH:
            raise TopologyError(f"elements are nested more than {MAX_DEPTH} deep", line=line)
        if self._count > MAX_ELEMENTS:
            raise TopologyError(f"more than {MAX_ELEMENTS} elements", line=line)
        element = Element(name, dict(attrs.items()), line)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def endElement(self, name: str) -> None:
        self._open.pop()


def read(text: str) -> Element:
    """Returns the root element of an XML text.

    Args:
        text: The whole file, decoded.

    Raises:
        TopologyError: The text is no well-formed XML, brings its own entities, or exceeds the limits.
    """
    builder = _Builder()
    try:
        parse(io.StringIO(text), builder, forbid_dtd=True)
    except DefusedXmlException as error:
        raise TopologyError(f"the XML defines entities or a DTD, which a topology never needs ({error})") from None
    except SAXParseException as error:
        cut = error.getMessage() == "no element found" and builder.root is not None
        reason = "the file is cut off" if cut else error.getMessage()
        raise TopologyError(f"not well-formed XML: {reason}", line=error.getLineNumber()) from None
    except (SAXException, ValueError, LookupError) as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"not readable as XML: {error}") from None
    if builder.root is None:
        raise TopologyError("the XML has no element")
    return builder.root
