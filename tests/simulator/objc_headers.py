"""Reads what the stand-in Apple headers declare: methods, enum values, structs, functions."""

import functools
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from build_support.simulator import find_compiler

HEADERS = ("Metal/Metal.h", "MetalPerformanceShadersGraph/MetalPerformanceShadersGraph.h",
           "dispatch/dispatch.h")
QUALIFIERS = re.compile(
    r"\b(_Nullable|_Nonnull|nullable|nonnull|const|oneway|struct|__strong|__autoreleasing"
    r"|__unsafe_unretained)\b")
SCALARS = {
    "void": "v", "BOOL": "Z", "bool": "Z", "char": "c", "int": "i", "unsigned int": "I",
    "long": "q", "unsigned long": "Q", "long long": "q", "unsigned long long": "Q",
    "float": "f", "double": "d", "uint8_t": "C", "uint64_t": "Q", "NSInteger": "q",
    "NSUInteger": "Q", "CFTimeInterval": "d",
    "NSStringEncoding": "Q", "Class": "#", "SEL": ":", "va_list": "va_list", "id": "@",
    "instancetype": "@", "ObjectType": "@", "KeyType": "@", "NSErrorDomain": "@",
    "dispatch_queue_t": "@", "dispatch_data_t": "@", "NSZone*": "^{_NSZone=}",
    "MTLCommandBufferHandler": "@?", "MTLSharedEventNotificationBlock": "@?",
    "MTLAutoreleasedComputePipelineReflection": "@",
}


@dataclass(frozen=True)
class Method:
    """One selector of a class or protocol, with types in Objective-C's encoding."""

    owner: str
    selector: str
    is_class_method: bool
    return_type: str
    argument_types: tuple[str, ...]


@dataclass
class Declarations:
    """Everything the headers declare that Apple could declare otherwise."""

    methods: list[Method] = field(default_factory=list)
    bases: dict[str, list[str]] = field(default_factory=dict)   # superclass and protocols
    enum_values: dict[str, int] = field(default_factory=dict)
    enum_types: dict[str, str] = field(default_factory=dict)     # name -> encoding
    structs: dict[str, tuple[str, list[str]]] = field(default_factory=dict)  # encoding, field names
    functions: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)

    def encode(self, declared: str) -> str:
        """The type's @encode, written as pyobjc writes it (no qualifiers, 64 bit)."""
        text = re.sub(r"\s+", " ", QUALIFIERS.sub("", declared)).strip()
        if "(^" in text:
            return "@?"
        while re.search(r"<[^<>]*>", text):   # generics and protocols
            text = re.sub(r"\s*<[^<>]*>", "", text)
        text = text.replace(" *", "*").strip()
        if text in SCALARS:
            return SCALARS[text]
        if text in self.enum_types:
            return self.enum_types[text]
        if text in self.structs:
            return self.structs[text][0]
        if text.endswith("[]"):
            return "^" + self.encode(text[:-2])
        if text.endswith("*"):
            target = text[:-1].strip()
            if target in self.bases or target == "Protocol":
                return "@"
            return "*" if target == "char" else "^" + self.encode(target)
        raise ValueError(f"a type that the test does not know: {declared!r}")


def read_declarations(frameworks: Path) -> Declarations:
    """Parses the headers below `frameworks`, after clang's preprocessor."""
    text = _preprocess(frameworks)
    found = Declarations()
    for names in re.findall(r"@class ((?:\w+(?:, )?)+);", text):
        found.bases.update((name, []) for name in names.split(", "))
    _read_enums(text, found)
    _read_structs(text, found)
    blocks = list(_blocks(text))
    found.bases.update((name, bases) for name, bases, _ in blocks)
    for name, _, body in blocks:
        found.methods += _methods(name, body, found)
    outside = re.sub(r"(?s)@(protocol|interface) \w+[^;]*?\n.*?@end", "", text)
    exported = re.findall(r'extern "C" [^;{]*?(\w+)\s*(\([^;]*\))?\s*;', outside)
    in_block = re.search(r'(?s)extern "C" \{(.*?)\n\}', outside)
    exported += re.findall(r"^\w[\w *]*?(\w+)(\([^;^]*\^?[^;]*\));", in_block[1], re.MULTILINE)
    found.functions = {name for name, arguments in exported if arguments}
    found.constants = {name for name, arguments in exported if not arguments}
    for path in frameworks.rglob("*.h"):
        for name, value in re.findall(r"#define (MTL\w+) (\d+)\n", path.read_text()):
            found.enum_values[name] = int(value)
    return found


_compiler = functools.cache(find_compiler)


def _preprocess(frameworks: Path) -> str:
    source = "".join(f"#include <{header}>\n" for header in HEADERS)
    command = [*_compiler(), "-x", "objective-c++", "-std=c++20", "-fblocks",
               "-fobjc-runtime=gcc", f"-I{frameworks}", "-E", "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True, check=True)
    kept, is_ours = [], False
    for line in done.stdout.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            is_ours = marker[1].startswith(str(frameworks))
        elif is_ours and not line.startswith("#"):
            kept.append(line)
    return _without_attributes("\n".join(kept))


def _without_attributes(text: str) -> str:
    for match in reversed(list(re.finditer(r"__attribute__\(", text))):
        end = _closing(text, match.end() - 1)
        text = text[:match.start()] + text[end + 1:]
    return text


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced: {text[opening:opening + 60]!r}")


def _read_enums(text: str, found: Declarations) -> None:
    pattern = r"(?s)(?:typedef (\w+) (\w+); )?enum\s+(\w+)?\s*:\s*(\w+)\s*\{(.*?)\}"
    for _, option, name, base, body in re.findall(pattern, text):
        if option or name:
            found.enum_types[option or name] = SCALARS[base]
        for constant, value in re.findall(r"(\w+)\s*=\s*(\d+)", body):
            found.enum_values[constant] = int(value)


def _read_structs(text: str, found: Declarations) -> None:
    for tag, body, name in re.findall(r"(?s)typedef struct (\w+)?\s*\{(.*?)\}\s*(\w+);", text):
        encoding, names = "", []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            first, *others = [part.strip() for part in declaration.split(",")]
            kind, first_name, count = re.fullmatch(r"(.*?)(\w+)(?:\[(\d+)\])?", first).groups()
            for each in [first_name, *others]:
                code = found.encode(kind)
                encoding += f"[{count}{code}]" if count else code
                names.append(each)
        found.structs[name] = (f"{{{tag or name}={encoding}}}", names)


def _blocks(text: str):
    pattern = r"(?s)@(?:protocol|interface) (\w+)[^\S\n]*([^;\n]*(?:\n +:[^\n]*)?)\n(.*?)@end"
    for name, heading, body in re.findall(pattern, text):
        if heading.startswith("<__covariant"):   # generics come before the superclass
            heading = heading[heading.index(">") + 1:]
        yield name, re.findall(r"\w+", heading), body


def _methods(owner: str, body: str, found: Declarations) -> list[Method]:
    methods = []
    for part in re.sub(r"\s+", " ", body).split(";"):
        start = re.search(r"@property|[-+] \(", part)   # behind instance variables and @optional
        declaration = part[start.start():] if start else ""
        if declaration.startswith("@property"):
            methods += _property(owner, declaration, found)
        elif declaration:
            methods.append(_method(owner, declaration, found))
    return methods


def _property(owner: str, declaration: str, found: Declarations) -> list[Method]:
    parts = re.fullmatch(r"@property ?\(([^)]*)\) ?(.*?)(\w+) ?", declaration)
    attributes, kind, name = parts.groups()
    encoded = found.encode(kind)
    methods = [Method(owner, name, False, encoded, ())]
    if "readonly" not in attributes:
        setter = f"set{name[0].upper()}{name[1:]}:"
        methods.append(Method(owner, setter, False, "v", (encoded,)))
    return methods


def _method(owner: str, declaration: str, found: Declarations) -> Method:
    opening = declaration.index("(")
    closing = _closing(declaration, opening)
    return_type = found.encode(declaration[opening + 1:closing])
    rest, selector, arguments = declaration[closing + 1:].strip(), "", []
    while ":" in rest:
        opening = rest.index("(")
        closing = _closing(rest, opening)
        selector += rest[:opening].strip()
        arguments.append(found.encode(_array_as_pointer(rest[opening + 1:closing])))
        rest = re.sub(r"^\s*\w+\s*", "", rest[closing + 1:])
    return Method(owner, selector or rest.strip(), declaration[0] == "+", return_type,
                  tuple(arguments))


def _array_as_pointer(kind: str) -> str:
    return re.sub(r"\[\s*(_Nullable|_Nonnull)?\s*\]", "[]", kind)
