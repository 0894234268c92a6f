#include "compiler_rules.h"

#include <algorithm>
#include <map>
#include <set>

namespace sim {
namespace {

using Index = std::ptrdiff_t;

bool is_any(const Token& token, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), token.text) != words.end();
}

bool is_address_space(const Token& token) {
  return is_any(token, {"thread", "device", "constant", "threadgroup"});
}

class Rules {
 public:
  Rules(const Tokens& tokens, const Declarations& declarations, int language_version)
      : tokens_(tokens), declarations_(declarations), language_version_(language_version) {}

  std::string run() {
    check_words();
    check_variables();
    for (const Function& f : declarations_.functions) {
      if (!tokens_[f.name_token].is_user_text) continue;
      check_function(f);
    }
    check_recursion();
    std::string result;
    for (const auto& [token, message] : errors_) {
      result += tokens_.position(tokens_[token]) + ": error: " + message + "\n";
    }
    return result;
  }

 private:
  void refuse(size_t token, std::string message) {
    if (tokens_[token].is_user_text) errors_.emplace(token, std::move(message));
  }

  void check_words();
  void check_variables();
  void check_function(const Function& f);
  void check_body(const Function& f);
  void check_pointers(TokenRange range, const char* what);
  void check_statement(TokenRange range);
  void check_abstract_pointers(TokenRange range);
  void check_recursion();
  std::set<std::string> callees(const Function& f, const std::set<std::string>& names) const;

  const Tokens& tokens_;
  const Declarations& declarations_;
  const int language_version_;
  std::map<size_t, std::string> errors_;
};

void Rules::check_words() {
  static const std::map<std::string_view, const char*> kRefused = {
      {"double", "'double' is not supported in Metal"},
      {"goto", "'goto' is not supported in Metal"},
      {"virtual", "virtual functions are not supported in Metal"},
      {"throw", "exceptions are not supported in Metal"},
      {"try", "exceptions are not supported in Metal"},
      {"catch", "exceptions are not supported in Metal"},
      {"dynamic_cast", "'dynamic_cast' is not supported in Metal"},
      {"typeid", "'typeid' is not supported in Metal"},
      {"new", "'new' is not supported in Metal"},
      {"thread_local", "'thread_local' is not supported in Metal"},
      {"asm", "inline assembly is not supported in Metal"},
  };
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const Token& token = tokens_[i];
    if (token.kind == TokenKind::Identifier) {
      const auto refused = kRefused.find(token.text);
      if (refused != kRefused.end()) refuse(i, refused->second);
      if (token.is("bfloat") && language_version_ < 310) {
        refuse(i, "unknown type name 'bfloat': it needs Metal 3.1");
      }
      const Token& before = tokens_.at(Index(i) - 1);
      if (token.is("delete") && !before.is("=")) refuse(i, "'delete' is not supported in Metal");
    } else if (token.is("[") && token.partner >= 0) {
      const Token& before = tokens_.at(Index(i) - 1);
      const Token& after = tokens_.at(token.partner + 1);
      const bool is_expression = is_any(before, {"(", ",", "=", "return", "{", ";", "}", "?", ":"});
      const bool is_attribute = tokens_.at(i + 1).is("[") || before.is("[");
      if (is_expression && !is_attribute && is_any(after, {"(", "{"})) {
        refuse(i, "lambda expressions are not supported in Metal");
      }
    }
  }
}

bool holds(const Tokens& tokens, TokenRange range, std::string_view word) {
  for (size_t i = range.begin; i < range.end; ++i) {
    if (tokens[i].is(word)) return true;
  }
  return false;
}

bool holds_pack(const Tokens& tokens, TokenRange range) {
  for (size_t i = range.begin; i + 1 < range.end; ++i) {
    if (tokens[i].is(".") && tokens[i + 1].is(".")) return true;
  }
  return false;
}

void Rules::check_variables() {
  for (const Variable& v : declarations_.variables) {
    if (v.is_member) {
      TokenRange declarator = v.range;
      for (size_t i = v.range.begin; i < v.range.end; ++i) {
        if (is_any(tokens_[i], {"=", "{"})) {
          declarator.end = i;
          break;
        }
      }
      check_pointers(declarator, "member");
      if (holds(tokens_, declarator, "static") && !holds(tokens_, declarator, "constant")) {
        // A static constexpr member without a space is constant by default in MSL.
        if (!holds(tokens_, declarator, "constexpr") && !holds(tokens_, declarator, "const")) {
          refuse(v.range.begin, "a static member must reside in the constant address space");
        }
      }
    } else if (!holds(tokens_, v.range, "constant") && !holds(tokens_, v.range, "template")) {
      refuse(v.range.begin, "program scope variable must reside in constant address space");
    }
  }
}

void Rules::check_function(const Function& f) {
  for (const Parameter& p : parse_parameters(tokens_, f.parameters)) {
    TokenRange declarator = p.range;
    for (size_t i = p.range.begin; i < p.range.end; ++i) {
      if (tokens_[i].is("=")) {
        declarator.end = i;
        break;
      }
    }
    check_pointers(declarator, "parameter");
  }
  if (f.name.rfind("operator", 0) != 0) {
    check_pointers({f.head.begin, f.name_token}, "return type");
  }
  if (f.has_body) check_body(f);
}

// Each * and & of a declarator wants an address space to its left.
void Rules::check_pointers(TokenRange range, const char* what) {
  bool has_space = false;
  for (size_t i = range.begin; i < range.end; ++i) {
    const Token& token = tokens_[i];
    if (is_address_space(token)) has_space = true;
    if (token.is("<")) {
      i = std::max(skip_angles(tokens_, i), i + 1) - 1;
    } else if (token.is("(") && (tokens_.at(i + 1).is("&") || tokens_.at(i + 1).is("*"))) {
      continue;   // T (&x)[n]: the space stands before the parenthesis
    } else if ((token.is("(") || token.is("[")) && token.partner > Index(i)) {
      i = token.partner;
    } else if (token.is("*") || token.is("&")) {
      if (!has_space) {
        refuse(i, std::string(token.is("*") ? "pointer" : "reference") + " type (" + what +
                      ") must have an explicit address space qualifier");
      }
      has_space = false;
    }
  }
}

void Rules::check_body(const Function& f) {
  size_t statement = f.body.begin;
  for (size_t i = f.body.begin; i < f.body.end; ++i) {
    const Token& token = tokens_[i];
    const bool opens_for = token.is("(") && tokens_.at(Index(i) - 1).is("for");
    if (is_any(token, {";", "{", "}"}) || opens_for || token.kind == TokenKind::Directive) {
      check_statement({statement, i});
      statement = i + 1;
    }
    const bool is_threadgroup = token.is("threadgroup") && !f.is_kernel;
    if (is_threadgroup && i == statement) {
      size_t end = i;
      while (end < f.body.end && !is_any(tokens_[end], {";", "=", "*", "&", "("})) ++end;
      if (tokens_[end].is(";")) {
        refuse(i, "variables in the threadgroup address space can only be declared in a kernel");
      }
    }
  }
  check_abstract_pointers(f.body);
}

// A local declaration: specifiers, a type, * or &, a name.
void Rules::check_statement(TokenRange range) {
  size_t i = range.begin;
  bool is_static = false, has_space = false;
  for (; i < range.end && (is_address_space(tokens_[i]) ||
                           is_any(tokens_[i], {"const", "constexpr", "static", "volatile"}));
       ++i) {
    is_static = is_static || tokens_[i].is("static");
    has_space = has_space || is_address_space(tokens_[i]);
  }
  if (is_static && !has_space) {
    refuse(range.begin, "static local variables are not supported in Metal");
  }
  if (i >= range.end || tokens_[i].kind != TokenKind::Identifier) return;
  if (is_any(tokens_[i], {"return", "case", "else", "sizeof", "using", "typedef"})) return;
  if (tokens_[i].is("typename")) ++i;
  for (; i < range.end; ++i) {
    if (is_address_space(tokens_[i])) has_space = true;
    if (tokens_[i].is("<")) {
      const size_t after = skip_angles(tokens_, i);
      if (after == i) return;
      i = after - 1;
    } else if (tokens_[i].kind != TokenKind::Identifier && !tokens_[i].is("::")) {
      break;
    }
  }
  const Token& sign = tokens_.at(Index(i));
  const bool names_next = i + 1 < range.end && tokens_[i + 1].kind == TokenKind::Identifier;
  const bool is_declared = i + 2 >= range.end || is_any(tokens_[i + 2], {"=", "[", ",", ":"});
  if (i < range.end && is_any(sign, {"*", "&"}) && names_next && is_declared && !has_space) {
    refuse(i, std::string(sign.is("*") ? "pointer" : "reference") +
                  " type (local variable) must have an explicit address space qualifier");
  }
}

// T* or T& in a cast or template argument: a * that nothing can be multiplied with follows.
void Rules::check_abstract_pointers(TokenRange range) {
  for (size_t i = range.begin; i < range.end; ++i) {
    if (!is_any(tokens_[i], {"*", "&"}) || !is_any(tokens_.at(i + 1), {")", ">"})) continue;
    bool has_space = false;
    size_t j = i;
    for (int depth = 0; j > range.begin; --j) {
      const Token& token = tokens_[j - 1];
      if (token.is(">")) ++depth;
      if (depth == 0 && is_any(token, {"(", ",", "<", ";", "{", "*", "&"})) break;
      if (token.is("<")) --depth;
      has_space = has_space || is_address_space(token);
    }
    if (!has_space && j < i) {
      refuse(i, std::string(tokens_[i].is("*") ? "pointer" : "reference") +
                    " type must have an explicit address space qualifier");
    }
  }
}

std::set<std::string> Rules::callees(const Function& f, const std::set<std::string>& names) const {
  std::set<std::string> result;
  for (size_t i = f.body.begin; i < f.body.end; ++i) {
    const Token& before = tokens_.at(Index(i) - 1);
    if (tokens_[i].kind == TokenKind::Identifier && tokens_.at(i + 1).is("(") &&
        !is_any(before, {".", "->", "::"}) && names.count(std::string(tokens_[i].text))) {
      result.insert(std::string(tokens_[i].text));
    }
  }
  return result;
}

// A constructor's name is its type's: what looks like a call of it may be of another one.
bool is_constructor(const Tokens& tokens, const Function& f) {
  for (size_t i = f.head.begin; f.is_member && i < f.name_token; ++i) {
    const bool is_specifier = is_any(tokens[i], {"explicit", "constexpr", "inline", "~"});
    if (tokens[i].kind == TokenKind::Identifier && !is_specifier) return false;
  }
  return f.is_member;
}

// Calls among functions that have their name to themselves: overloads may call each other, and
// templates may end at another instance.
void Rules::check_recursion() {
  std::map<std::string, std::vector<const Function*>> by_name;
  for (const Function& f : declarations_.functions) {
    if (f.has_body && !is_constructor(tokens_, f)) by_name[f.name].push_back(&f);
  }
  std::set<std::string> names;
  for (const auto& [name, functions] : by_name) {
    const Function& f = *functions.front();
    if (functions.size() == 1 && !holds_pack(tokens_, f.template_header)) names.insert(name);
  }
  std::map<std::string, std::set<std::string>> reached;
  for (const std::string& name : names) reached[name] = callees(*by_name[name].front(), names);
  for (bool is_growing = true; is_growing;) {
    is_growing = false;
    for (auto& [name, set] : reached) {
      const std::set<std::string> before = set;
      for (const std::string& next : before) set.insert(reached[next].begin(), reached[next].end());
      is_growing = is_growing || set.size() != before.size();
    }
  }
  for (const auto& [name, set] : reached) {
    if (set.count(name)) {
      refuse(by_name[name].front()->name_token,
             "recursion is not supported in Metal: '" + name + "' calls itself");
    }
  }
}

}  // namespace

std::string check_rules(const Tokens& tokens, const Declarations& declarations,
                        int language_version) {
  return Rules(tokens, declarations, language_version).run();
}

}  // namespace sim
