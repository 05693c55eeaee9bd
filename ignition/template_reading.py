"""What the source of a chat template says: the variables that it reads, and the values that it compares one with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jinja2 import meta, nodes

from flare.text.sandbox import Sandbox


def variables_read(source: str) -> set[str]:
    """Names that the template takes from outside. One that it sets itself counts only where it asks for a default."""
    sandbox = Sandbox()
    tree = sandbox.parse(source)
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    stored |= {macro.name for macro in tree.find_all(nodes.Macro)}
    for node in tree.find_all((nodes.Test, nodes.Filter)):
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name):
            stored.discard(node.node.name)
    # This call folds constants inside the tree that it is given.
    return meta.find_undeclared_variables(tree) - sandbox.globals.keys() - stored


def compared(tree: nodes.Template, variable: str) -> list[str]:
    """The strings that the template compares a variable, or one that takes its value, with."""
    names = {variable}
    literals: dict[str, nodes.Node] = {}
    for node in _in_order(tree):
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            if _carries(node.node, names):
                names.add(node.target.name)
            elif isinstance(node.node, (nodes.Dict, nodes.List, nodes.Tuple)):
                literals[node.target.name] = node.node
    found: dict[str, None] = {}
    for node in _in_order(tree):
        sides: list[nodes.Node] = []
        if isinstance(node, nodes.Compare):
            sides = [node.expr, *(operand.expr for operand in node.ops)]
        elif isinstance(node, nodes.Getitem):
            sides = [node.node, node.arg]
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            sides = [node.node.node, *node.args[:1]]
        if any(_carries(side, names) for side in sides):
            found |= dict.fromkeys(text for side in sides for text in _strings(side, literals))
    return list(found)


def _carries(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression's value is that of one of the variables, perhaps filtered or defaulted."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Filter):
        return node.node is not None and _carries(node.node, names)
    if isinstance(node, nodes.Call):  # a method, such as lower()
        return isinstance(node.node, nodes.Getattr) and _carries(node.node.node, names)
    if isinstance(node, nodes.Or):
        return _carries(node.left, names)
    if isinstance(node, nodes.CondExpr):
        return _carries(node.expr1, names) or (node.expr2 is not None and _carries(node.expr2, names))
    return False


def _strings(node: nodes.Node, literals: Mapping[str, nodes.Node]) -> Iterator[str]:
    """The strings that an expression lists: itself, items of a list, keys of a mapping, or those of a named one."""
    if isinstance(node, nodes.Const):
        if isinstance(node.value, str) and node.value:
            yield node.value
    elif isinstance(node, (nodes.List, nodes.Tuple)):
        for item in node.items:
            yield from _strings(item, literals)
    elif isinstance(node, nodes.Dict):
        for pair in node.items:
            yield from _strings(pair.key, literals)
    elif isinstance(node, nodes.Name) and node.name in literals:
        yield from _strings(literals[node.name], {})


def _in_order(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _in_order(child)
