"""The stand-in headers declare what Apple declares, in the same way, and nothing else."""

import functools
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

if sys.platform == "darwin":
    pytest.skip("the stand-in headers are for Linux", allow_module_level=True)

from apple_api import AppleApi, read_apple_api
from objc_headers import Declarations, read_declarations
from wheels import wheel_folder

FRAMEWORKS = Path(__file__).resolve().parents[2] / "csrc" / "simulator" / "frameworks"

# Neither wheel speaks of these. Apple documents each, and PyTorch's host code or ours uses it.
FOUNDATION_LACKS = "metal-cpp wraps only a part of Foundation"
MPS_LACKS = "MetalPerformanceShaders is in neither wheel"
NOT_IN_WHEELS = {
    FOUNDATION_LACKS: {
        "NSCopying": "copyWithZone:",
        "NSArray": "objectAtIndexedSubscript: firstObject",
        "NSDictionary": "objectForKeyedSubscript: allKeys",
        "NSNumber": "numberWithInteger: numberWithUnsignedInteger:",
        "NSString": "integerValue stringWithUTF8String: stringWithFormat: initWithUTF8String: "
                    "initWithFormat: initWithFormat:arguments: initWithBytes:length:encoding: "
                    "hasPrefix: hasSuffix: containsString:",
        "NSURL": "path",
    },
    MPS_LACKS: {
        "MPSCommandBuffer": "commandBuffer rootCommandBuffer commandBufferWithCommandBuffer: "
                            "commandBufferFromCommandQueue: initWithCommandBuffer: "
                            "commitAndContinue",
    },
}
# pyobjc keeps one entry for a selector of all protocols; these are of another one.
OTHER_PROTOCOLS_TYPE = {("MTLCommandBuffer", "status"), ("MTLFunctionConstant", "type")}


@pytest.fixture(scope="module")
def apple() -> AppleApi:
    return read_apple_api(wheel_folder("pyobjc-framework-metal"), wheel_folder("mlx-metal"))


@pytest.fixture(scope="module")
def ours() -> Declarations:
    return read_declarations(FRAMEWORKS)


@functools.cache
def macos_header(name: str) -> str:
    """A header of macOS itself, of those that the zig package carries."""
    root = Path(importlib.util.find_spec("ziglang").origin).parent
    return (root / "lib" / "libc" / "include" / "any-darwin-any" / name).read_text()


def root_class_has(selector: str) -> bool:
    name = selector.rstrip(":")
    return bool(re.search(rf"\){name}\b|[ *]{name};", macos_header("objc/NSObject.h")))


def complaints(ours: Declarations, apple: AppleApi) -> list[str]:
    return [*selector_complaints(ours, apple), *type_complaints(ours, apple),
            *value_complaints(ours, apple), *struct_complaints(ours, apple),
            *name_complaints(ours, apple)]


def selector_complaints(ours: Declarations, apple: AppleApi):
    excused = {(owner, selector) for owners in NOT_IN_WHEELS.values()
               for owner, selectors in owners.items() for selector in selectors.split()}
    for method in ours.methods:
        known = (apple.has_selector(method.owner, method.selector)
                 or (method.owner, method.selector) in excused
                 or method.owner == "NSObject" and root_class_has(method.selector)
                 or method.selector == "init")
        if not known:
            yield f"{method.owner} has no selector {method.selector}"


def type_complaints(ours: Declarations, apple: AppleApi):
    for method in ours.methods:
        result, arguments = apple.types.get(method.selector, (None, {}))
        if (not method.owner.startswith("MTL")
                or (method.owner, method.selector) in OTHER_PROTOCOLS_TYPE):
            continue
        pairs = [("returns", result, method.return_type)]
        pairs += [(f"argument {index}", expected, method.argument_types[index])
                  for index, expected in arguments.items()]
        for what, expected, found in pairs:
            if expected is not None and expected != found:
                yield f"{method.owner} {method.selector}: {what} {found}, Apple's {expected}"


def value_complaints(ours: Declarations, apple: AppleApi):
    for name, value in ours.enum_values.items():
        if apple.enum_values.get(name) != value:
            yield f"{name} = {value}, Apple's {apple.enum_values.get(name)}"
    for name, base in ours.enum_types.items():
        if apple.enum_types.get(name) != base:
            yield f"enum {name} is {base}, Apple's {apple.enum_types.get(name)}"


def struct_complaints(ours: Declarations, apple: AppleApi):
    for name, (encoding, fields) in ours.structs.items():
        expected, expected_fields = apple.structs.get(name, (None, None))
        if fields != expected_fields or (expected and encoding != expected):
            yield f"struct {name}: {encoding} {fields}, Apple's {expected} {expected_fields}"


def name_complaints(ours: Declarations, apple: AppleApi):
    system = macos_header("dispatch/queue.h") + macos_header("dispatch/object.h")
    system += macos_header("dispatch/data.h") + macos_header("_time.h") + macos_header("time.h")
    for name in sorted(ours.functions | ours.constants):
        if name not in apple.names and not re.search(rf"\b{name}\b", system) and name != "NSLog":
            yield f"Apple has no {name}"


def test_declarations_are_apples(ours, apple):
    assert complaints(ours, apple) == []


def test_the_headers_were_read(ours):
    """The parser sees everything: what it missed would never be compared."""
    text = "".join(path.read_text() for path in FRAMEWORKS.rglob("*.h"))
    text = re.sub(r"//.*", "", text)
    declared = len(re.findall(r"(?m)^[-+] \(", text))
    properties = len(re.findall(r"(?m)^@property", text))
    readonly = len(re.findall(r"(?m)^@property ?\([^)]*readonly", text))
    assert len(ours.methods) == declared + properties + (properties - readonly)
    constant = r"(?m)^  (?:MTL|NS)\w+[^=;]* = \d+,|define MTL\w+ \d"
    assert len(ours.enum_values) == len(re.findall(constant, text))
    assert {"MTLSize", "MTLOrigin", "NSRange", "NSFastEnumerationState"} == set(ours.structs)
    assert {"MTLCreateSystemDefaultDevice", "dispatch_sync", "NSLog"} <= ours.functions
    assert "MTLLibraryErrorDomain" in ours.constants


def test_excuses_are_needed(ours, apple):
    declared = {(method.owner, method.selector) for method in ours.methods}
    for owners in NOT_IN_WHEELS.values():
        for owner, selectors in owners.items():
            for selector in selectors.split():
                assert (owner, selector) in declared
                assert not apple.has_selector(owner, selector), f"{owner} {selector} is in a wheel"


PLANTED = {
    "selector": ("Metal/MTLBuffer.h", "- (void)didModifyRange:", "- (void)didModifyBytes:",
                 "MTLBuffer has no selector didModifyBytes:"),
    "selector-of-another-class": ("Metal/MTLBuffer.h", "- (void*)contents",
                                  "- (void)endEncoding;\n- (void*)contents",
                                  "MTLBuffer has no selector endEncoding"),
    "property": ("Metal/MTLLibrary.h", "languageVersion;", "languageDialect;",
                 "MTLCompileOptions has no selector setLanguageDialect:"),
    "argument-type": ("Metal/MTLCommandBuffer.h", "value:(uint64_t)value", "value:(int)value",
                      "argument 1 i, Apple's Q"),
    "return-type": ("Metal/MTLDevice.h", "- (BOOL)supportsFamily", "- (int)supportsFamily",
                    "returns i, Apple's Z"),
    "enum-value": ("Metal/MTLCommandBuffer.h", "StatusError = 5", "StatusError = 6",
                   "MTLCommandBufferStatusError = 6, Apple's 5"),
    "enum-type": ("Metal/MTLDevice.h", "NS_ENUM(NSInteger, MTLGPUFamily)",
                  "NS_ENUM(NSUInteger, MTLGPUFamily)", "enum MTLGPUFamily is Q, Apple's q"),
    "struct": ("Metal/MTLTypes.h", "NSUInteger width, height, depth;",
               "NSUInteger height, width, depth;", "struct MTLSize"),
    "function": ("Metal/MTLDevice.h", "MTLCopyAllDevices(void)", "MTLCopyEveryDevice(void)",
                 "Apple has no MTLCopyEveryDevice"),
    "nsobject": ("Foundation/NSObject.h", "- (NSUInteger)retainCount", "- (NSUInteger)retainNumber",
                 "NSObject has no selector retainNumber"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_apple_lacks_is_found(planted, tmp_path, apple):
    file, original, replacement, complaint = PLANTED[planted]
    copy = tmp_path / "frameworks"
    shutil.copytree(FRAMEWORKS, copy)
    text = (copy / file).read_text()
    assert original in text
    (copy / file).write_text(text.replace(original, replacement, 1))
    found = complaints(read_declarations(copy), apple)
    assert any(complaint in one for one in found), found
