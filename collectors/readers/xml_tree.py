"""XML of tools as plain nodes: bounded, without document types or entities.

In: bytes. Out: the root Node. A document type with declarations inside, or an entity, is refused:
they can grow without bound or name other files. `nvidia-smi -q -x` names an external DTD, which is
never fetched. Depth, count and text are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

DEPTH = 40
NODES = 400_000
_TEXT = 400


class XmlError(ValueError):
    """Not XML, or XML that is refused; the message says which."""


@dataclass
class Node:
    """One element."""

    name: str
    attributes: dict[str, str]
    line: int
    text: str = ""
    children: list[Node] = field(default_factory=list)

    def first(self, *path: str) -> Node | None:
        """The first descendant along `path`."""
        node: Node | None = self
        for name in path:
            node = (
                None if node is None else next((c for c in node.children if c.name == name), None)
            )
        return node

    def say(self, *path: str) -> str:
        """The text of that descendant, "" when it is absent."""
        node = self.first(*path)
        return "" if node is None else node.text.strip()


def parse(data: bytes) -> Node:
    """The root element; XmlError says what is wrong."""
    parser: Any = expat.ParserCreate()
    top = Node("", {}, 0)
    open_nodes = [top]
    count = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > NODES or len(open_nodes) > DEPTH:
            raise XmlError(f"more than {NODES} elements, or nested deeper than {DEPTH}")
        kept = {k: v[:_TEXT] for k, v in attributes.items()}
        node = Node(name, kept, parser.CurrentLineNumber)
        open_nodes[-1].children.append(node)
        open_nodes.append(node)

    def end(_name: str) -> None:
        open_nodes.pop()

    def text(part: str) -> None:
        node = open_nodes[-1]
        if len(node.text) < _TEXT:
            node.text += part[:_TEXT]

    def doctype(_name: str, _system: str | None, _public: str | None, inside: bool) -> None:
        if inside:
            raise XmlError("a document type with declarations is refused")

    def entity(*_what: object) -> None:
        raise XmlError("entity declarations are refused")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text
    parser.StartDoctypeDeclHandler = doctype
    parser.EntityDeclHandler = entity
    try:
        parser.Parse(data, True)
    except expat.ExpatError as wrong:
        raise XmlError(f"not XML: {wrong}") from None
    if not top.children:
        raise XmlError("no element in it")
    return top.children[0]
