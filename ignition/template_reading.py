"""What the source of a chat template says: the variables that it reads, and the values that it compares one with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jinja2 import meta, nodes

from flare.text.sandbox import Sandbox

_COMPARING = frozenset({"==", "!=", "eq", "equalto", "ne", "sameas", "in"})
# Tests that compare, as in `effort is equalto "low"`.


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
    """The strings that the template compares a variable, or one that takes its value, with.

    Values are followed into other variables, attributes of namespaces, blocks that print them and arguments of macros.
    """
    carriers = _carriers(tree, variable)
    literals = _literals(tree)
    found: dict[str, None] = {}
    for node, macro in _in_order(tree):
        sides = _sides(node)
        if any(_carries(side, carriers[macro]) for side in sides):
            found |= dict.fromkeys(text for side in sides for text in _strings(side, literals))
    return list(found)


def _carriers(tree: nodes.Template, variable: str) -> dict[str, set[str]]:
    """The names that have a variable's value, by the macro in which they do, "" outside of any; "a.b" for attributes."""
    macros = {node.name: node for node in tree.find_all(nodes.Macro)}
    carriers: dict[str, set[str]] = {"": {variable}} | {name: set() for name in macros}
    size = 0
    while size != (size := sum(map(len, carriers.values()))):
        for name, macro in macros.items():
            # What is known outside is known in a macro, unless one of its arguments has the name.
            carriers[name] |= carriers[""] - {argument.name for argument in macro.args}
        for node, macro_name in _in_order(tree):
            names = carriers[macro_name]
            names |= _assigned(node, names)
            if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in macros:
                called = macros[node.node.name]
                given = [*zip((argument.name for argument in called.args), node.args, strict=False)]
                given += [(pair.key, pair.value) for pair in node.kwargs]
                carriers[called.name] |= {argument for argument, value in given if _carries(value, names)}
    return carriers


def _assigned(node: nodes.Node, names: set[str]) -> set[str]:
    """The names to which a node gives the value of one of `names`."""
    given: list[tuple[str | None, nodes.Node]] = []
    if isinstance(node, nodes.Macro):
        given += zip((argument.name for argument in reversed(node.args)), reversed(node.defaults), strict=False)
    elif isinstance(node, nodes.AssignBlock):
        given += [(_path(node.target), item) for output in node.find_all(nodes.Output) for item in output.nodes]
    elif isinstance(node, nodes.Assign):
        target, value = node.target, node.node
        if isinstance(target, nodes.Tuple) and isinstance(value, nodes.Tuple):
            given += zip(map(_path, target.items), value.items, strict=False)
        elif isinstance(value, nodes.Call) and isinstance(value.node, nodes.Name):  # namespace(...), dict(...)
            given += [(f"{_path(target)}.{pair.key}", pair.value) for pair in value.kwargs]
        else:
            given.append((_path(target), value))
    return {name for name, value in given if name is not None and _carries(value, names)}


def _path(node: nodes.Node) -> str | None:
    """The name of a variable, or of an attribute of one: "a.b"."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and isinstance(node.arg, nodes.Const):
        return f"{node.node.name}.{node.arg.value}"
    return None


def _carries(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression's value is that of one of the variables, perhaps filtered or defaulted."""
    if _path(node) in names:
        return True
    if isinstance(node, nodes.Filter):
        return node.node is not None and _carries(node.node, names)
    if isinstance(node, nodes.Call):  # a method, such as lower()
        return isinstance(node.node, nodes.Getattr) and _carries(node.node.node, names)
    if isinstance(node, nodes.Or):
        return _carries(node.left, names)
    if isinstance(node, nodes.CondExpr):
        return _carries(node.expr1, names) or (node.expr2 is not None and _carries(node.expr2, names))
    return False


def _sides(node: nodes.Node) -> list[nodes.Node]:
    """The expressions that a node holds against each other."""
    if isinstance(node, nodes.Compare):
        return [node.expr, *(operand.expr for operand in node.ops)]
    if isinstance(node, nodes.Test) and node.name in _COMPARING:
        return [node.node, *node.args]
    if isinstance(node, nodes.Getitem):
        return [node.node, node.arg]
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        return [node.node.node, *node.args[:1]]
    return []


def _literals(tree: nodes.Template) -> dict[str, nodes.Node]:
    """The lists and mappings that have a name, or whose items have it in a loop."""
    literals: dict[str, nodes.Node] = {}
    for node, _ in _in_order(tree):
        if isinstance(node, nodes.Assign):
            target, value = node.target, node.node
        elif isinstance(node, nodes.For):
            target, value = node.target, _looped(node.iter)
            if isinstance(target, nodes.Tuple):  # of keys and values
                target = target.items[0]
        else:
            continue
        if isinstance(target, nodes.Name):
            if isinstance(value, nodes.Name):
                value = literals.get(value.name, value)
            if isinstance(value, (nodes.Dict, nodes.List, nodes.Tuple)):
                literals[target.name] = value
    return literals


def _looped(node: nodes.Node) -> nodes.Node:
    """The list or mapping that a loop is over, without `items` and the like."""
    while True:
        if isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            node = node.node.node
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.EnvironmentAttribute) and node.args:
            node = node.args[0]  # the sandbox counts what loops run over
        else:
            return node


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


def _in_order(node: nodes.Node, macro: str = "") -> Iterator[tuple[nodes.Node, str]]:
    """Every node, with the name of the macro that it is in."""
    if isinstance(node, nodes.Macro):
        macro = node.name
    yield node, macro
    for child in node.iter_child_nodes():
        yield from _in_order(child, macro)
