"""Language rules of Metal that an ordinary C++ compiler would let pass."""

import sys

import pytest

if sys.platform == "darwin":
    pytest.skip("a Mac has Apple's compiler", allow_module_level=True)

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
# In a case, HERE marks the line that the message must name.
KERNEL = "kernel void run(device float* out [[buffer(0)]]) {{\n{}\n}}\n"


def in_kernel(*statements: str) -> str:
    return KERNEL.format("\n".join(statements))


# What is refused, what the message says, and a neighbour that Metal accepts.
RULES = {
    "double": (
        in_kernel("double x = 1;  // HERE", "out[0] = x;"), "'double' is not supported",
        in_kernel("float x = 1;", "out[0] = x;  // not a double")),
    "double_parameter": (
        "float half_of(double x) {  // HERE\n return x / 2; }\n"
        + in_kernel("out[0] = half_of(2);"),
        "'double' is not supported",
        "float half_of(float x) {\n return x / 2; }\n" + in_kernel("out[0] = half_of(2);")),
    "long_double_in_a_template": (
        in_kernel("out[0] = float(vec<float, 2>(1).x);", "using T = long double;  // HERE"),
        "'double' is not supported",
        in_kernel("out[0] = float(vec<float, 2>(1).x);", "using T = long;")),
    "pointer_parameter": (
        "float first(const float* p) { return p[0]; }  // HERE\n" + in_kernel("out[0] = 1;"),
        "pointer type (parameter) must have an explicit address space",
        "float first(const device float* p) { return p[0]; }\n"
        + in_kernel("out[0] = first(out);")),
    "reference_parameter": (
        "void set(float& x) { x = 1; }  // HERE\n" + in_kernel("out[0] = 1;"),
        "reference type (parameter) must have an explicit address space",
        "void set(thread float& x) { x = 1; }\n" + in_kernel("float x;", "set(x);", "out[0] = x;")),
    "pointer_to_pointer": (
        "void set(thread float** p) { **p = 1; }  // HERE\n" + in_kernel("out[0] = 1;"),
        "pointer type (parameter) must have an explicit address space",
        "void set(thread float* thread* p) { **p = 1; }\n" + in_kernel(
            "float x;", "thread float* p = &x;", "set(&p);", "out[0] = x;")),
    "local_pointer": (
        in_kernel("float x = 1;", "float* p = &x;  // HERE", "out[0] = *p;"),
        "pointer type (local variable) must have an explicit address space",
        in_kernel("float x = 1;", "thread float* p = &x;", "out[0] = *p * x;")),
    "local_reference": (
        in_kernel("float x = 1;", "const float& y = x;  // HERE", "out[0] = y;"),
        "reference type (local variable) must have an explicit address space",
        in_kernel("float x = 1;", "const thread float& y = x;", "out[0] = y & 1 ? x : y;".replace(
            "y & 1", "int(y) & 1"))),
    "member_pointer": (
        "struct View {\n  float* data;  // HERE\n};\n" + in_kernel("out[0] = 1;"),
        "pointer type (member) must have an explicit address space",
        "struct View {\n  device float* data;\n};\n" + in_kernel("View v{out};", "v.data[0] = 1;")),
    "returned_pointer": (
        "float* same(device float* p);  // HERE\n" + in_kernel("out[0] = 1;"),
        "pointer type (return type) must have an explicit address space",
        "device float* same(device float* p) { return p; }\n" + in_kernel("same(out)[0] = 1;")),
    "pointer_in_a_cast": (
        in_kernel("out[0] = ((float*)out)[0];  // HERE"),
        "pointer type must have an explicit address space",
        in_kernel("out[0] = ((device float*)out)[0] * (out[1] * (out[2]));")),
    "pointer_in_a_template_argument": (
        in_kernel("out[0] = reinterpret_cast<float*>(out)[0];  // HERE"),
        "pointer type must have an explicit address space",
        in_kernel("out[0] = reinterpret_cast<device float*>(out)[0];")),
    "virtual": (
        "struct Shape {\n  virtual float area() const { return 1; }  // HERE\n};\n"
        + in_kernel("out[0] = 1;"), "virtual functions are not supported",
        "struct Shape {\n  float area() const { return 1; }\n};\n"
        + in_kernel("out[0] = Shape().area();")),
    "try": (
        in_kernel("try {  // HERE", "out[0] = 1;", "} catch (int) {}"), "exceptions|'try'",
        in_kernel("int retry = 1;", "out[0] = retry;")),
    "throw": (
        in_kernel("if (out[0] > 1) throw 1;  // HERE"), "exceptions|'throw'",
        in_kernel("if (out[0] > 1) out[0] = 1;")),
    "typeid": (
        in_kernel("out[0] = typeid(float) == typeid(int);  // HERE"), "'typeid'",
        in_kernel("out[0] = is_same_v<float, int>;")),
    "dynamic_cast": (
        "struct A { int x; };\n" + in_kernel(
            "thread A* p = nullptr;", "out[0] = dynamic_cast<thread A*>(p) == p;  // HERE"),
        "'dynamic_cast'",
        "struct A { int x; };\n" + in_kernel(
            "thread A* p = nullptr;", "out[0] = static_cast<thread A*>(p) == p;")),
    "recursion": (
        "int sum(int n) {  // HERE\n  return n == 0 ? 0 : n + sum(n - 1);\n}\n"
        + in_kernel("out[0] = sum(4);"), "recursion is not supported in Metal: 'sum'",
        "int sum(int n) {\n  return n == 0 ? 0 : n;\n}\n" + in_kernel("out[0] = sum(sum(4));")),
    "mutual_recursion": (
        "int odd(int n);\nint even(int n) {  // HERE\n  return n == 0 || odd(n - 1);\n}\n"
        "int odd(int n) { return n != 0 && even(n - 1); }\n" + in_kernel("out[0] = even(4);"),
        "recursion is not supported in Metal: 'even'",
        "int odd(int n);\nint even(int n) {\n  return n == 0 || odd(n - 1);\n}\n"
        "int odd(int n) { return n % 2; }\n" + in_kernel("out[0] = even(4);")),
    "recursion_of_a_member": (
        "struct Sum {\n  int up_to(int n) const {  // HERE\n"
        "    return n == 0 ? 0 : n + up_to(n - 1);\n  }\n};\n"
        + in_kernel("out[0] = Sum().up_to(int(out[0]));"),
        "recursion is not supported",
        "struct Sum {\n  int one() const { return 1; }\n"
        "  int two() const { return one() + one(); }\n};\n" + in_kernel("out[0] = Sum().two();")),
    "recursion_of_a_template": (
        "template <typename T> T sum(T n) {  // HERE\n  return n == 0 ? n : n + sum(n - 1);\n}\n"
        + in_kernel("out[0] = sum(int(out[0]));"), "recursion is not supported",
        "template <int N> int sum() { return N + sum<N - 1>(); }\n"
        "template <> int sum<0>() { return 0; }\n" + in_kernel("out[0] = sum<4>();")),
    "new": (
        in_kernel("auto p = new float(1);  // HERE", "out[0] = *p;"), "'new' is not supported",
        in_kernel("float renew = 1, news = 2;", "out[0] = renew + news;")),
    "delete": (
        in_kernel("thread float* p = nullptr;", "delete p;  // HERE"), "'delete' is not supported",
        "struct A {\n  A() = default;\n  A(const thread A&) = delete;\n};\n"
        + in_kernel("A a;", "out[0] = sizeof(a);")),
    "goto": (
        in_kernel("again:", "out[0] += 1;", "if (out[0] < 3) goto again;  // HERE"),
        "'goto' is not supported",
        in_kernel("while (out[0] < 3) {", "  out[0] += 1;", "  continue;", "}")),
    "static_variable": (
        in_kernel("static int calls = 0;  // HERE", "out[0] = ++calls;"),
        "static local variables are not supported",
        in_kernel("constexpr int calls = 0;", "out[0] = calls;")),
    "thread_local": (
        in_kernel("thread_local int calls = 0;  // HERE", "out[0] = ++calls;"), "thread_local",
        in_kernel("thread int calls = 0;", "out[0] = ++calls;")),
    "global_variable": (
        "int calls = 0;  // HERE\n" + in_kernel("out[0] = 1;"),
        "program scope variable must reside in constant address space",
        "constant int calls = 0;\n" + in_kernel("out[0] = calls;")),
    "static_global_variable": (
        "static float table[2] = {1, 2};  // HERE\n" + in_kernel("out[0] = table[1];"),
        "program scope variable must reside in constant address space",
        "static constant float table[2] = {1, 2};\n" + in_kernel("out[0] = table[1];")),
    "static_member": (
        "struct A {\n  static int calls;  // HERE\n};\n" + in_kernel("out[0] = 1;"),
        "a static member must reside in the constant address space",
        "struct A {\n  static constexpr constant int calls = 2;\n"
        "  static int twice(int x) { return 2 * x; }\n};\n"
        + in_kernel("out[0] = A::twice(A::calls);")),
    "lambda": (
        in_kernel("auto f = [](float x) { return x + 1; };  // HERE", "out[0] = f(1);"),
        "lambda expressions are not supported",
        "struct F {\n  float operator()(float x) const { return x + 1; }\n};\n"
        + in_kernel("F f;", "float a[2] = {1, 2};", "out[0] = f(a[1]);",
                    "out[uint(a[0])] = {a[0]};")),
    "lambda_as_an_argument": (
        "template <typename F> float call(F f) { return f(); }\n"
        + in_kernel("float x = 1;", "out[0] = call([=] { return x; });  // HERE"),
        "lambda expressions are not supported",
        "template <typename F> float call(F f) { return f(); }\n"
        "struct One {\n  float operator()() const { return 1; }\n};\n"
        + in_kernel("out[0] = call(One());")),
    "threadgroup_variable_outside_a_kernel": (
        "void helper() {\n  threadgroup float x[4];  // HERE\n}\n" + in_kernel("out[0] = 1;"),
        "threadgroup address space can only be declared in a kernel",
        "void helper(threadgroup float* x) { x[0] = 1; }\n"
        + in_kernel("threadgroup float x[4];", "helper(x);", "out[0] = x[0];")),
    "mixed_address_spaces": (
        "void set(device float* p) { p[0] = 1; }\n"
        + in_kernel("threadgroup float x[4];", "set(x);  // HERE"), "no matching function|cannot",
        "void set(device float* p) { p[0] = 1; }\n" + in_kernel("set(out);")),
    "write_to_constant_memory": (
        "kernel void run(constant float& x [[buffer(0)]]) {\n  x = 1;  // HERE\n}\n",
        "const", "kernel void run(device float& x [[buffer(0)]]) {\n  x = 1;\n}\n"),
    "inline_assembly": (
        in_kernel('asm("nop");  // HERE', "out[0] = 1;"), "assembly",
        in_kernel("float asmr = 1;", "out[0] = asmr;")),
    "implicit_narrowing_to_bfloat": (
        in_kernel("float x = out[0];", "bfloat y = x;  // HERE", "out[0] = y;"), "bfloat",
        in_kernel("float x = out[0];", "bfloat y = bfloat(x);", "out[0] = y;")),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_metal_refuses_is_refused_by_its_line(simulator, rule):
    refused, message, _ = RULES[rule]
    source = HEADER + refused
    line = source[:source.index("// HERE")].count("\n") + 1
    with pytest.raises(RuntimeError) as error:
        simulator.Library(source)
    lines = [one for one in str(error.value).splitlines()
             if one.startswith(f"program_source:{line}:") and ": error: " in one]
    assert any(part in one for one in lines for part in message.split("|")), str(error.value)


@pytest.mark.parametrize("rule", RULES)
def test_its_neighbour_is_accepted(simulator, rule):
    assert "run" in simulator.Library(HEADER + RULES[rule][2]).function_names


def test_lines_are_those_of_the_original(simulator):
    """Comments, macros of several lines and #line leave the numbers as an author counts them."""
    source = HEADER + """/* a comment
of two lines */
#define ADD(a, b) \\
  ((a) + \\
   (b))
kernel void run(device float* out [[buffer(0)]]) {
  out[0] = ADD(1,
               2);
  out[1] = missing;
}
"""
    with pytest.raises(RuntimeError, match=r"program_source:11:12: error: .*'missing'"):
        simulator.Library(source)


def test_every_violation_is_listed(simulator):
    source = in_kernel("double x = 1;", "static int y = 2;", "out[0] = x + y;", "goto end;",
                       "end:;")
    with pytest.raises(RuntimeError) as error:
        simulator.Library(source)
    for line in (2, 3, 5):
        assert f"program_source:{line}:" in str(error.value)
