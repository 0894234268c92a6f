#include "compiler_declarations.h"

#include <algorithm>

namespace sim {
namespace {

bool is_any(const Token& token, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), token.text) != words.end();
}

class Parser {
 public:
  explicit Parser(const Tokens& tokens) : tokens_(tokens) {}

  Declarations run() {
    parse_scope({0, tokens_.size()}, false);
    return std::move(result_);
  }

 private:
  void parse_scope(TokenRange range, bool is_class) {
    for (size_t i = range.begin; i < range.end;) {
      const size_t next = parse_declaration(i, range.end, is_class);
      i = std::max(next, i + 1);
    }
  }

  size_t parse_declaration(size_t begin, size_t end, bool is_class) {
    const Token& first = tokens_[begin];
    if (first.kind == TokenKind::Directive || is_any(first, {";", "}"})) return begin + 1;
    if (is_any(first, {"public", "private", "protected"})) return begin + 2;
    size_t i = begin;
    if (first.is("inline") && tokens_.at(i + 1).is("namespace")) ++i;
    if (tokens_[i].is("namespace")) return parse_namespace(i, end);
    if (first.is("extern") && tokens_.at(begin + 1).kind == TokenKind::String &&
        tokens_.at(begin + 2).is("{")) {
      parse_scope({begin + 3, static_cast<size_t>(tokens_[begin + 2].partner)}, is_class);
      return tokens_[begin + 2].partner + 1;
    }
    if (is_any(first, {"using", "typedef", "static_assert", "friend", "_Static_assert"})) {
      return semicolon_after(begin, end);
    }
    if (first.is("template") && !tokens_.at(begin + 1).is("<")) {
      return parse_instantiation(begin, end);
    }
    TokenRange header;
    while (i < end && tokens_[i].is("template")) {
      const size_t after = skip_angles(tokens_, i + 1);
      if (after == i + 1) break;
      header = {i + 1, after};
      i = after;
    }
    if (tokens_.at(i).is("using")) return semicolon_after(i, end);
    return parse_entity(begin, header, i, end, is_class);
  }

  size_t parse_namespace(size_t i, size_t end) {
    std::vector<std::string> names;
    for (++i; i < end && !is_any(tokens_[i], {"{", "=", ";"}); ++i) {
      if (tokens_[i].kind == TokenKind::Identifier) names.emplace_back(tokens_[i].text);
    }
    if (!tokens_.at(i).is("{")) return semicolon_after(i, end);
    namespaces_.insert(namespaces_.end(), names.begin(), names.end());
    parse_scope({i + 1, static_cast<size_t>(tokens_[i].partner)}, false);
    namespaces_.resize(namespaces_.size() - names.size());
    return tokens_[i].partner + 1;
  }

  // A class, enumeration, function or variable.
  size_t parse_entity(size_t begin, TokenRange header, size_t head, size_t end, bool is_class) {
    bool is_enum = false, is_record = false;
    for (size_t i = head; i < end;) {
      const Token& token = tokens_[i];
      if (is_any(token, {"struct", "class", "union"})) is_record = true;
      if (token.is("enum")) is_enum = true;
      if (token.is(";")) return add_variable(head, i + 1, is_class, is_record || is_enum);
      if (token.is("=") || (token.is("{") && !is_record && !is_enum)) {
        return add_variable(head, semicolon_after(i, end), is_class, false);
      }
      if (token.is("{")) {
        if (is_record) parse_scope({i + 1, static_cast<size_t>(token.partner)}, true);
        return semicolon_after(token.partner, end);
      }
      if (is_any(token, {"__attribute__", "alignas", "decltype", "noexcept", "explicit"}) &&
          tokens_.at(i + 1).is("(")) {
        i = tokens_[i + 1].partner + 1;
      } else if (token.is("operator")) {
        do ++i;
        while (i < end && !tokens_[i].is("("));
        if (tokens_.at(i + 1).is(")") && tokens_.at(i + 2).is("(")) i += 2;   // operator()
        return parse_function(begin, header, head, i, end, is_class);
      } else if (token.is("(")) {
        return parse_function(begin, header, head, i, end, is_class);
      } else if (token.is("[")) {
        i = token.partner + 1;
      } else if (token.is("<")) {
        i = std::max(skip_angles(tokens_, i), i + 1);
      } else {
        ++i;
      }
    }
    return end;
  }

  size_t parse_function(size_t begin, TokenRange header, size_t head, size_t open, size_t end,
                        bool is_class) {
    Function f;
    f.template_header = header;
    f.head = {head, open};
    f.name_token = open - 1;
    f.name = tokens_[open - 1].text;
    for (size_t i = head; i < open; ++i) {
      if (tokens_[i].is("operator")) f.name = "operator" + text_of(tokens_, {i + 1, open});
    }
    f.parameters = {open + 1, static_cast<size_t>(tokens_[open].partner)};
    f.is_member = is_class;
    f.namespaces = namespaces_;
    f.attributes = parse_attributes(tokens_, f.head);
    f.is_kernel =
        !is_class && (find_attribute(f.attributes, "kernel") ||
                      std::any_of(tokens_.list.begin() + head, tokens_.list.begin() + open,
                                  [](const Token& t) { return t.is("kernel"); }));
    size_t i = f.parameters.end + 1;
    f.qualifiers.begin = i;
    while (i < end && !is_any(tokens_[i], {";", "{", ":", "="})) {
      i = tokens_[i].partner > static_cast<int32_t>(i) ? tokens_[i].partner + 1 : i + 1;
    }
    f.qualifiers.end = i;
    if (tokens_.at(i).is(":")) i = skip_initialisers(i + 1, end);
    if (tokens_.at(i).is("{")) {
      f.has_body = true;
      f.body = {i + 1, static_cast<size_t>(tokens_[i].partner)};
      i = f.body.end + 1;
    } else {
      i = semicolon_after(i, end);
    }
    f.range = {begin, i};
    result_.functions.push_back(std::move(f));
    return i;
  }

  // name(value), name{value}, ... up to the body's brace.
  size_t skip_initialisers(size_t i, size_t end) {
    while (i < end) {
      while (i < end && !is_any(tokens_[i], {"(", "{"})) {
        i = tokens_[i].is("<") ? std::max(skip_angles(tokens_, i), i + 1) : i + 1;
      }
      if (i >= end) break;
      i = tokens_[i].partner + 1;
      if (!tokens_.at(i).is(",")) break;
      ++i;
    }
    return i;
  }

  size_t add_variable(size_t begin, size_t end, bool is_class, bool is_type_only) {
    Variable v{{begin, end}, is_class, parse_attributes(tokens_, {begin, end})};
    if (const Attribute* a = find_attribute(v.attributes, "function_constant"); a && !is_class) {
      add_constant(v, *a);
    } else if (!is_type_only) {
      result_.variables.push_back(std::move(v));
    }
    return end;
  }

  void add_constant(const Variable& v, const Attribute& attribute) {
    size_t name = attribute.text.begin;
    while (name > v.range.begin && tokens_[name].kind != TokenKind::Identifier) --name;
    std::string type;
    for (size_t i = v.range.begin; i < name; ++i) {
      if (is_any(tokens_[i], {"constant", "const", "constexpr", "static", "inline"})) continue;
      type += (type.empty() ? "" : " ") + std::string(tokens_[i].text);
    }
    result_.constants.push_back(
        {v.range, std::string(tokens_[name].text), type, attribute.arguments});
  }

  size_t parse_instantiation(size_t begin, size_t end) {
    Instantiation x;
    x.range = {begin, semicolon_after(begin, end)};
    x.namespaces = namespaces_;
    for (const Attribute& a : parse_attributes(tokens_, x.range)) {
      if (a.name != "host_name") continue;
      for (size_t i = a.arguments.begin; i < a.arguments.end; ++i) {
        if (tokens_[i].kind != TokenKind::String) continue;
        x.host_name += tokens_[i].text.substr(1, tokens_[i].text.size() - 2);
      }
    }
    size_t i = begin + 1, id = 0;
    while (i + 1 < x.range.end) {
      const Token& token = tokens_[i];
      if (token.is("[")) {
        i = token.partner + 1;
      } else if (token.is("decltype") || token.is("__attribute__")) {
        i = tokens_[i + 1].partner + 1;
      } else if (token.is("(")) {
        break;
      } else if (token.is("<")) {
        id = i;
        i = std::max(skip_angles(tokens_, i), i + 1);
      } else {
        ++i;
      }
    }
    if (id != 0) {
      size_t name = id - 1;
      x.function = tokens_[name].text;
      while (tokens_.at(name - 1).is("::") && name >= begin + 2) name -= 2;
      x.template_id = text_of(tokens_, {name, i});
      if (x.host_name.empty()) x.host_name = x.template_id;
      result_.instantiations.push_back(std::move(x));
      return result_.instantiations.back().range.end;
    }
    return x.range.end;
  }

  size_t semicolon_after(size_t i, size_t end) const {
    while (i < end && !tokens_[i].is(";")) {
      i = tokens_[i].partner > static_cast<int32_t>(i) ? tokens_[i].partner + 1 : i + 1;
    }
    return std::min(i + 1, end);
  }

  const Tokens& tokens_;
  Declarations result_;
  std::vector<std::string> namespaces_;
};

std::string parameter_name(const Tokens& tokens, TokenRange range) {
  std::string name;
  for (size_t i = range.begin; i < range.end; ++i) {
    if (is_any(tokens[i], {"[", "="})) break;
    if (tokens[i].kind == TokenKind::Identifier) name = tokens[i].text;
  }
  return name;
}

}  // namespace

size_t skip_angles(const Tokens& tokens, size_t open) {
  if (!tokens.at(open).is("<")) return open;
  int depth = 0;
  for (size_t i = open; i < tokens.size(); ++i) {
    const Token& token = tokens[i];
    if (token.is("<")) ++depth;
    if (token.is(">") && --depth == 0) return i + 1;
    if (is_any(token, {";", "{", "}", ")", "]"})) return open;
    if (token.partner > static_cast<int32_t>(i)) i = token.partner;
  }
  return open;
}

std::vector<Attribute> parse_attributes(const Tokens& tokens, TokenRange range) {
  std::vector<Attribute> result;
  for (size_t i = range.begin; i + 1 < range.end; ++i) {
    if (!tokens[i].is("[") || !tokens[i + 1].is("[") ||
        tokens[i].partner != tokens[i + 1].partner + 1) {
      continue;
    }
    const TokenRange text{i, static_cast<size_t>(tokens[i].partner) + 1};
    for (size_t j = i + 2; j + 2 < text.end; ++j) {
      if (tokens[j].kind != TokenKind::Identifier) continue;
      Attribute attribute{std::string(tokens[j].text), {}, text};
      if (tokens[j + 1].is("(")) {
        attribute.arguments = {j + 2, static_cast<size_t>(tokens[j + 1].partner)};
        j = tokens[j + 1].partner;
      }
      result.push_back(std::move(attribute));
    }
    i = text.end - 1;
  }
  return result;
}

std::vector<Parameter> parse_parameters(const Tokens& tokens, TokenRange range) {
  std::vector<Parameter> result;
  size_t begin = range.begin;
  for (size_t i = range.begin; i <= range.end && begin < range.end; ++i) {
    if (i < range.end && !tokens[i].is(",")) {
      const size_t after = skip_angles(tokens, i);
      if (after > i)
        i = after - 1;
      else if (tokens[i].partner > static_cast<int32_t>(i))
        i = tokens[i].partner;
      continue;
    }
    const TokenRange one{begin, i};
    result.push_back({one, parameter_name(tokens, one), parse_attributes(tokens, one)});
    begin = i + 1;
  }
  return result;
}

std::string text_of(const Tokens& tokens, TokenRange range) {
  std::string result;
  for (size_t i = range.begin; i < range.end; ++i) {
    if (tokens[i].kind == TokenKind::Directive) continue;
    const bool touches = i > range.begin && tokens[i - 1].end() == tokens[i].offset;
    if (!result.empty() && !touches) result += ' ';
    result += tokens[i].text;
  }
  return result;
}

const Attribute* find_attribute(const std::vector<Attribute>& attributes, std::string_view name) {
  for (const Attribute& attribute : attributes) {
    if (attribute.name == name) return &attribute;
  }
  return nullptr;
}

Declarations parse_declarations(const Tokens& tokens) {
  return tokens.is_balanced ? Parser(tokens).run() : Declarations{};
}

}  // namespace sim
