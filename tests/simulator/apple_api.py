"""Apple's API as carried by two macOS packages: pyobjc's metadata and Metal's C++ headers."""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class AppleApi:
    """What Apple declares: selectors by class, types, enum values, structs, other names."""

    selectors: dict[str, set[str]] = field(default_factory=dict)   # class or protocol -> selectors
    bases: dict[str, list[str]] = field(default_factory=dict)
    types: dict[str, tuple[str | None, dict[int, str]]] = field(default_factory=dict)
    enum_values: dict[str, int] = field(default_factory=dict)
    enum_types: dict[str, str] = field(default_factory=dict)
    structs: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)                   # of functions and constants

    def has_selector(self, owner: str, selector: str) -> bool:
        """Whether the class or protocol, or one that it inherits from, has the selector."""
        if selector in self.selectors.get(owner, ()):
            return True
        return any(self.has_selector(base, selector) for base in self.bases.get(owner, ()))


def read_apple_api(pyobjc: Path, mlx: Path) -> AppleApi:
    """Reads the unpacked wheels of pyobjc-framework-metal and mlx-metal."""
    api = AppleApi()
    _read_metal_cpp(next(mlx.rglob("metal_cpp")), api)
    _read_pyobjc((pyobjc / "Metal" / "_metadata.py").read_text(), api)
    return api


def _read_pyobjc(text: str, api: AppleApi) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            _read_call(node, api)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name = node.targets[0].id
            if name == "enums":
                for entry in filter(None, node.value.value.split("$")):
                    constant, value = entry.split("@")
                    api.enum_values[constant] = int(value)
            elif name == "constants":
                api.names.update(entry.split("@")[0] for entry in node.value.value.split("$"))
        elif isinstance(node, ast.Dict):   # functions are the keys of a table
            api.names.update(key.value for key in node.keys
                             if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _read_call(node: ast.Call, api: AppleApi) -> None:
    function = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    try:
        arguments = [ast.literal_eval(each) for each in node.args]
    except ValueError:   # a type that differs between processors
        return
    if function == "createStructType":
        name, encoding, fields = arguments
        api.structs[name.removeprefix("Metal.")] = (encoding.decode(), fields)
    elif function == "r" and len(arguments) == 3:
        owner, selector, details = arguments
        result = details.get("retval", {}).get("type")
        types = {index - 2: _plain(one["type"])
                 for index, one in details.get("arguments", {}).items() if "type" in one}
        api.types[selector.decode()] = (_plain(result) if result else None, types)
        if owner != b"NSObject":   # the name under which protocols are registered, all in one
            api.selectors.setdefault(owner.decode(), set()).add(selector.decode())


def _plain(encoding: bytes | str) -> str:
    """Without the qualifiers in, out, const, ..."""
    text = encoding if isinstance(encoding, str) else encoding.decode()
    text = re.sub(r"^[nNoORV]+", "", text)
    return "C" if text == "z" else text   # pyobjc's own letter for a byte that is a number


def _read_metal_cpp(folder: Path, api: AppleApi) -> None:
    for prefix, directory in (("MTL", folder / "Metal"), ("NS", folder / "Foundation")):
        texts = [path.read_text() for path in sorted(directory.glob("*.hpp"))]
        spelling = dict(pair for text in texts for pair in
                        re.findall(r"_PRIVATE_DEF_SEL\((\w+),\s*\"([^\"]+)\"\)", text))
        for text in texts:
            _read_classes(text, prefix, spelling, api)
            _read_enums(text, prefix, api)
            _read_structs(text, prefix, api)
            api.names.update(prefix + name for name in re.findall(r"_CONST\(\w+, (\w+)\)", text))


def _read_classes(text: str, prefix: str, spelling: dict[str, str], api: AppleApi) -> None:
    for name, arguments in re.findall(r"\nclass (\w+) : public (?:NS::)?\w+<([^>]*)>", text):
        names = [each.split("::")[-1].strip() for each in arguments.split(",")]
        api.bases[prefix + name] = [prefix + each for each in names if each != name]
    for definition in re.split(r"_INLINE ", text)[1:]:
        owner = re.match(rf"[^{{;]*?\b{prefix}::(\w+)::\w+\(", definition)
        if owner:
            selectors = api.selectors.setdefault(prefix + owner[1], set())
            selectors.update(map(spelling.get, re.findall(r"_PRIVATE_SEL\((\w+)\)", definition)))


def _read_enums(text: str, prefix: str, api: AppleApi) -> None:
    pattern = r"(?s)_(?:ENUM|OPTIONS)\((\S+), (\w+)\)\s*\{(.*?)\}"
    for base, name, body in re.findall(pattern, text):
        api.enum_types[prefix + name] = {"NS::Integer": "q", "NS::UInteger": "Q"}.get(base, base)
        if prefix == "NS":   # pyobjc has Metal's
            for constant, value in re.findall(r"(\w+)\s*=\s*(\d+)", body):
                api.enum_values[prefix + constant] = int(value)


def _read_structs(text: str, prefix: str, api: AppleApi) -> None:
    """Names of the fields only; pyobjc's structs, which have encodings, are read later."""
    for name, body in re.findall(r"(?s)\nstruct (\w+)\s*\{(.*?)\n\}", text):
        fields = re.findall(r"\n\s+[\w:*]+(?: \w+)?[ *]+(\w+)(?:\[\d+\])?;", body)
        api.structs[prefix + name] = ("", fields)
