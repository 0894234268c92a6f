// What a Metal source declares, as far as the simulator must know: kernels, their explicit
// instantiations, function constants; and where functions, members and variables stand.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "compiler_tokens.h"

namespace sim {

struct TokenRange {
  size_t begin = 0, end = 0;   // half open
  bool is_empty() const { return begin >= end; }
};

struct Attribute {
  std::string name;
  TokenRange arguments;        // inside its parentheses
  TokenRange text;
};

struct Parameter {
  TokenRange range;
  std::string name;
  std::vector<Attribute> attributes;
};

struct Function {
  TokenRange range;            // template header to closing brace or semicolon
  TokenRange template_header;  // from < to >, empty when not a template
  TokenRange head;             // specifiers, return type and name
  size_t name_token = 0;
  std::string name;
  TokenRange parameters;       // inside the parentheses
  TokenRange qualifiers;       // between parameters and body
  TokenRange body;             // inside the braces; empty for a declaration
  bool has_body = false;
  bool is_kernel = false;
  bool is_member = false;
  std::vector<Attribute> attributes;
  std::vector<std::string> namespaces;
};

// template [[host_name("x")]] [[kernel]] ... f<arguments>...;
struct Instantiation {
  TokenRange range;
  std::string host_name;
  std::string template_id;     // "f<float, 64>"
  std::string function;        // "f"
  std::vector<std::string> namespaces;
};

struct Variable {
  TokenRange range;            // with the semicolon
  bool is_member = false;      // of a class
  std::vector<Attribute> attributes;
};

struct ConstantDeclaration {
  TokenRange range;            // with the semicolon
  std::string name, type;
  TokenRange index;            // the expression in [[function_constant(...)]]
};

struct Declarations {
  std::vector<Function> functions;
  std::vector<Instantiation> instantiations;
  std::vector<Variable> variables;
  std::vector<ConstantDeclaration> constants;
};

Declarations parse_declarations(const Tokens& tokens);

// The token after the > that closes the template arguments opened at `open`; `open` when it is no such list.
size_t skip_angles(const Tokens& tokens, size_t open);
std::vector<Attribute> parse_attributes(const Tokens& tokens, TokenRange range);
std::vector<Parameter> parse_parameters(const Tokens& tokens, TokenRange range);
// The source text of a range, line markers left out.
std::string text_of(const Tokens& tokens, TokenRange range);
const Attribute* find_attribute(const std::vector<Attribute>& attributes, std::string_view name);

}  // namespace sim
