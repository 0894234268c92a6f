#include "compiler_rewriter.h"

#include <algorithm>
#include <set>

#include "compiler_entry.h"

namespace sim {

const char kUnsetConstantPrefix[] = "sim_unset_function_constant.";

namespace {

// More explicit instantiations than this are checked one by one, when a kernel is built.
constexpr size_t kMaxCheckedInstantiations = 4;

struct Edit {
  uint32_t begin, end;
  std::string replacement;
};

// Applies edits that do not overlap, each with as many line breaks as it replaces.
std::string apply(std::string_view source, std::vector<Edit> edits) {
  std::stable_sort(edits.begin(), edits.end(),
                   [](const Edit& a, const Edit& b) { return a.begin < b.begin; });
  std::string result;
  result.reserve(source.size() + 1024);
  uint32_t at = 0;
  for (const Edit& edit : edits) {
    if (edit.begin < at) continue;   // inside a region that has already been replaced
    result += source.substr(at, edit.begin - at);
    result += edit.replacement;
    // Line markers must survive: they keep the lines after them right.
    const std::string_view replaced = source.substr(edit.begin, edit.end - edit.begin);
    for (size_t line = replaced.find('\n'); line != std::string_view::npos;
         line = replaced.find('\n', line + 1)) {
      result += '\n';
      if (line + 1 < replaced.size() && replaced[line + 1] == '#') {
        const size_t end = std::min(replaced.find('\n', line + 1), replaced.size());
        result += replaced.substr(line + 1, end - line - 1);
      }
    }
    at = edit.end;
  }
  result += source.substr(at);
  return result;
}

bool is_vector_type(std::string_view name) {
  static const std::set<std::string, std::less<>> names = [] {
    std::set<std::string, std::less<>> all;
    for (const char* element : {"bool", "char", "uchar", "short", "ushort", "int", "uint", "long",
                                "ulong", "half", "float", "bfloat"}) {
      for (const char* count : {"2", "3", "4"}) all.insert(std::string(element) + count);
    }
    return all;
  }();
  return names.count(name) != 0;
}

class Rewriter {
 public:
  Rewriter(std::string_view source, const Tokens& tokens, const Declarations& declarations)
      : source_(source), tokens_(tokens), declarations_(declarations) {}

  void replace(TokenRange range, std::string text) {
    if (range.is_empty()) return;
    edits_.push_back({tokens_[range.begin].offset, tokens_[range.end - 1].end(), std::move(text)});
  }
  void insert_after(size_t token, std::string text) {
    edits_.push_back({tokens_[token].end(), tokens_[token].end(), std::move(text)});
  }
  std::string finish() { return apply(source_, std::move(edits_)); }

  void rewrite_kernel_attributes();
  void rewrite_threadgroup_arrays();
  void rewrite_constructors();
  void rewrite_parameters();
  void drop_members_of_other_spaces();

 private:
  void rewrite_threadgroup_declaration(TokenRange range, uint32_t& number);

  std::string_view source_;
  const Tokens& tokens_;
  const Declarations& declarations_;
  std::vector<Edit> edits_;
};

// [[kernel]] becomes inline, as the keyword `kernel` does.
void Rewriter::rewrite_kernel_attributes() {
  for (const Function& f : declarations_.functions) {
    const Attribute* a = f.is_kernel ? find_attribute(f.attributes, "kernel") : nullptr;
    if (a) replace(a->text, "inline");
  }
}

void Rewriter::rewrite_threadgroup_arrays() {
  for (const Function& f : declarations_.functions) {
    uint32_t number = 0;
    for (size_t i = f.body.begin; f.is_kernel && i < f.body.end; ++i) {
      const Token& before = tokens_.at(static_cast<std::ptrdiff_t>(i) - 1);
      const bool starts_statement =
          before.is("{") || before.is("}") || before.is(";") || before.kind == TokenKind::Directive;
      if (!starts_statement) continue;
      size_t semicolon = i;
      bool is_threadgroup = false, is_plain = true;
      for (; semicolon < f.body.end && !tokens_[semicolon].is(";"); ++semicolon) {
        const Token& token = tokens_[semicolon];
        if (token.is("<")) {
          semicolon = std::max(skip_angles(tokens_, semicolon), semicolon + 1) - 1;
        } else if (token.is("(") || token.is("[")) {
          semicolon = token.partner;
        } else if (token.is("{") || token.is("}") || token.is("=") || token.is("*") ||
                   token.is("&")) {
          is_plain = false;
          break;
        } else if (token.is("threadgroup")) {
          is_threadgroup = true;
        }
      }
      if (is_threadgroup && is_plain) rewrite_threadgroup_declaration({i, semicolon}, number);
    }
  }
}

// threadgroup T a[n], b;  ->  references to storage of the executor
void Rewriter::rewrite_threadgroup_declaration(TokenRange range, uint32_t& number) {
  // The first declarator is the last identifier before [ , or the end.
  size_t name = range.begin;
  std::string alignment = "1";
  std::string type;
  for (size_t i = range.begin; i < range.end && !tokens_[i].is("[") && !tokens_[i].is(","); ++i) {
    if (tokens_[i].is("alignas")) {
      alignment = text_of(tokens_, {i + 2, static_cast<size_t>(tokens_[i + 1].partner)});
      i = tokens_[i + 1].partner;
    } else if (tokens_[i].is("<")) {
      i = std::max(skip_angles(tokens_, i), i + 1) - 1;
    } else if (tokens_[i].kind == TokenKind::Identifier) {
      name = i;
    }
  }
  for (size_t i = range.begin; i < name; ++i) {
    if (tokens_[i].is("alignas"))
      i = tokens_[i + 1].partner;
    else if (!tokens_[i].is("threadgroup") && !tokens_[i].is("static")) {
      type += std::string(tokens_[i].text) + " ";
    }
  }
  std::string text;
  for (const Parameter& d : parse_parameters(tokens_, {name, range.end})) {
    const std::string declared = "sim_array_" + std::to_string(number);
    const std::string variable(tokens_[d.range.begin].text);
    text += "typedef " + type + declared + text_of(tokens_, {d.range.begin + 1, d.range.end}) +
            "; threadgroup " + declared + "& " + variable + " = ::sim::threadgroup_array<" +
            declared + ">(" + std::to_string(number) + ", " + alignment + ", \"" + variable +
            "\"); ";
    ++number;
  }
  text.resize(text.size() - 2);   // the statement's own semicolon follows
  replace(range, text);
}

// float4(...), vec<T, N>(...), static_cast<float4>(...); literals of bfloat
void Rewriter::rewrite_constructors() {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const Token& token = tokens_[i];
    const Token& next = tokens_.at(i + 1);
    const bool is_constructor = next.is("(") && !tokens_.at(i + 2).is("*") &&
                                !tokens_.at(i + 2).is("&") &&
                                !tokens_.at(static_cast<std::ptrdiff_t>(i) - 1).is("operator");
    if (token.kind == TokenKind::Number && token.text.size() > 2 && token.text[1] != 'x' &&
        token.text.substr(token.text.size() - 2) == "bf") {
      replace({i, i + 1},
              "bfloat(" + std::string(token.text.substr(0, token.text.size() - 2)) + ")");
    } else if (token.kind != TokenKind::Identifier) {
      continue;
    } else if (is_vector_type(token.text) && is_constructor) {
      if (tokens_.at(static_cast<std::ptrdiff_t>(i) - 1).is("::")) {
        const bool is_nested = tokens_.at(static_cast<std::ptrdiff_t>(i) - 2).is("metal");
        replace({is_nested ? i - 2 : i - 1, i + 1},
                "::metal::make_vector<" + std::string(token.text) + ">");
      } else {
        replace({i, i + 1}, "::metal::make_vector<" + std::string(token.text) + ">");
      }
    } else if (token.is("vec") && next.is("<")) {
      const size_t after = skip_angles(tokens_, i + 1);
      const bool is_call = after > i + 1 && tokens_.at(after).is("(") &&
                           !tokens_.at(after + 1).is("*") && !tokens_.at(after + 1).is("&") &&
                           !tokens_.at(static_cast<std::ptrdiff_t>(i) - 1).is("operator");
      if (is_call) replace({i, i + 1}, "make_vec");
    } else if (token.is("static_cast") && next.is("<") && is_vector_type(tokens_.at(i + 2).text) &&
               tokens_.at(i + 3).is(">")) {
      replace({i, i + 1}, "::metal::make_vector");
    }
  }
}

// `constant T x[n]` is a pointer in MSL, but clang refuses an address space on an array parameter.
// [[threadgroup(n)]] has a keyword's name. Nothing writes to constant memory while a kernel runs: clang
// need not read it again after every barrier.
void Rewriter::rewrite_parameters() {
  for (const Function& f : declarations_.functions) {
    for (const Parameter& p : parse_parameters(tokens_, f.parameters)) {
      for (const Attribute& a : p.attributes) {
        if (a.name == "threadgroup") replace(a.text, "");
      }
      bool has_space = false, is_constant = false;
      for (size_t i = p.range.begin; i < p.range.end; ++i) {
        const Token& token = tokens_[i];
        if (token.is("device") || token.is("constant") || token.is("threadgroup")) has_space = true;
        if (token.is("constant")) is_constant = true;
        if (token.is("*") || token.is("&")) {
          if (f.is_kernel && is_constant) insert_after(i, " __restrict ");
          break;
        }
        if (token.is("(")) break;
        if (!token.is("[")) continue;
        if (has_space && !tokens_[i + 1].is("[") && i > p.range.begin) {
          replace({i - 1, static_cast<size_t>(token.partner) + 1},
                  "(*" + std::string(tokens_[i - 1].text) + ")");
        }
        break;
      }
    }
  }
}

// Members qualified with an address space other than thread: clang has overloads by address space of
// `this` in OpenCL only.
void Rewriter::drop_members_of_other_spaces() {
  for (const Function& f : declarations_.functions) {
    for (size_t i = f.qualifiers.begin; f.is_member && i < f.qualifiers.end; ++i) {
      const Token& token = tokens_[i];
      if (token.is("device") || token.is("constant") || token.is("threadgroup")) {
        replace(f.range, "");
        break;
      }
    }
  }
}

std::string constant_definition(const ConstantDeclaration& c, uint32_t index,
                                const ConstantValues& values) {
  const auto value = values.find(index);
  if (value == values.end()) {
    return "extern constant const " + c.type + " " + c.name + " __asm__(\"" + kUnsetConstantPrefix +
           c.name + "\");";
  }
  std::string bytes;
  for (unsigned char byte : value->second) bytes += ", " + std::to_string(byte);
  return "constant constexpr " + c.type + " " + c.name + " = ::sim::constant_value<" + c.type +
         bytes + ">();";
}

// is_function_constant_defined(x) is a question about names, not values.
void rewrite_defined_queries(Rewriter& rewriter, const Tokens& tokens,
                             const std::map<std::string, std::string, std::less<>>& answers) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].is("is_function_constant_defined") || !tokens.at(i + 1).is("(")) continue;
    const auto answer = answers.find(tokens.at(i + 2).text);
    if (answer == answers.end()) continue;
    rewriter.replace({i, static_cast<size_t>(tokens[i + 1].partner) + 1}, answer->second);
  }
}

void rewrite_common(Rewriter& rewriter) {
  rewriter.drop_members_of_other_spaces();
  rewriter.rewrite_kernel_attributes();
  rewriter.rewrite_parameters();
  rewriter.rewrite_threadgroup_arrays();
  rewriter.rewrite_constructors();
}

}  // namespace

std::vector<KernelName> kernel_names(const Tokens& tokens, const Declarations& declarations) {
  std::vector<KernelName> result;
  for (const Function& f : declarations.functions) {
    if (!f.is_kernel || !f.template_header.is_empty() || !f.has_body) continue;
    const Attribute* host_name = find_attribute(f.attributes, "host_name");
    std::string name = host_name ? text_of(tokens, host_name->arguments) : f.name;
    name.erase(std::remove(name.begin(), name.end(), '"'), name.end());
    result.push_back({name, &f, nullptr});
  }
  for (const Instantiation& x : declarations.instantiations) {
    for (const Function& f : declarations.functions) {
      if (f.is_kernel && f.has_body && f.name == x.function && !f.template_header.is_empty()) {
        result.push_back({x.host_name, &f, &x});
        break;
      }
    }
  }
  return result;
}

SyntaxCheck rewrite_for_check(std::string_view source, const Tokens& tokens,
                              const Declarations& declarations) {
  Rewriter rewriter(source, tokens, declarations);
  SyntaxCheck result;
  std::set<std::string> checked;  // one of each template where there are many
  const bool is_few = declarations.instantiations.size() <= kMaxCheckedInstantiations;
  for (const Instantiation& x : declarations.instantiations) {
    const bool is_kept = checked.insert(x.function).second || is_few;
    result.instantiations += is_kept;
    rewriter.replace(x.range, is_kept ? "template <auto*> struct sim_use; using sim_check_" +
                                            std::to_string(result.instantiations) + " = sim_use<&" +
                                            x.template_id + ">;"
                                      : "");
  }
  std::map<std::string, std::string, std::less<>> answers;
  for (size_t i = 0; i < declarations.constants.size(); ++i) {
    const ConstantDeclaration& c = declarations.constants[i];
    answers[c.name] = "(" + c.name + " == " + c.name + ")";
    rewriter.replace(c.range, "extern constant const " + c.type + " " + c.name +
                                  "; using sim_index_of_" + c.name +
                                  " = ::sim::function_constant_index<" + std::to_string(i) + ", (" +
                                  text_of(tokens, c.index) + ")>;");
  }
  rewrite_defined_queries(rewriter, tokens, answers);
  rewrite_common(rewriter);
  result.text = rewriter.finish();
  return result;
}

std::string rewrite_for_kernel(std::string_view source, const Tokens& tokens,
                               const Declarations& declarations, const KernelName& kernel,
                               const std::vector<uint32_t>& indices, const ConstantValues& values) {
  Rewriter rewriter(source, tokens, declarations);
  for (const Instantiation& x : declarations.instantiations) rewriter.replace(x.range, "");
  std::map<std::string, std::string, std::less<>> answers;
  for (size_t i = 0; i < declarations.constants.size(); ++i) {
    const ConstantDeclaration& c = declarations.constants[i];
    answers[c.name] = values.count(indices.at(i)) ? "true" : "false";
    rewriter.replace(c.range, constant_definition(c, indices.at(i), values));
  }
  rewrite_defined_queries(rewriter, tokens, answers);
  rewriter.insert_after(kernel.function->range.end - 1, attributes_class(tokens, *kernel.function));
  rewrite_common(rewriter);
  return rewriter.finish() + entry_text(tokens, kernel);
}

}  // namespace sim
